// Which lines of a table are seen at first, with a word, a choice, a tick, and
// sorted by the second column, up and down; and what is said of their number.
() => {
  const root = document.querySelector(".on");
  const seen = () => [...root.querySelectorAll("tbody tr")].filter(
      line => line.getClientRects().length).map(
          line => line.cells[0].textContent).join(" ");
  const [word, box, choice] = ["[type=search]", "[type=checkbox]", "select"].map(
      name => root.querySelector(name));
  const found = [seen()];
  const tried = (input, name, value) => {
    const before = input[name];
    for (const it of [value, before]) {
      input[name] = it;
      input.dispatchEvent(new Event("input"));
      if (it === value) found.push(
          seen() + ": " + root.querySelector("output").value);
    }
  };
  tried(word, "value", " 10 M");
  tried(choice, "value", "v");
  tried(box, "checked", true);
  const [, sort] = root.querySelectorAll("th button");
  for (let i = 0; i < 2; i++) { sort.click(); found.push(seen()); }
  return found;
};
