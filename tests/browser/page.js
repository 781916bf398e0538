// What a page says of its copy buttons and its navigation.
async (w, d) => {
  let copied = null;
  const wrong = [], blocks = [...d.querySelectorAll("article .highlight pre")],
      href = selector => [...d.querySelectorAll(selector)].map(a =>
      a.getAttribute("href"));
  const answer = {blocks: blocks.length, wrong, previous: href("a.left-prev"),
      next: href("a.right-next"),
      sections: d.querySelectorAll("article h2").length,
    contents: href(".bd-sidebar-secondary a"),
        downloads: href("a.btn-download-source-button"),
    search: d.querySelectorAll("form.bd-search").length};
  const whole = [...d.body.childNodes], ids = blocks.map(pre => pre.id);
  if (new Set(ids).size < ids.length) wrong.push("blocks of one name");
  // the page's scripts copy from a selected field
  d.execCommand = () => { copied = d.activeElement.value; return true; };
  for (const pre of blocks) {
    const all = pre.textContent, block = pre.parentElement.cloneNode(true),
        button = block.querySelector("button.copybtn");
    if (!button) { wrong.push("no button: " + name(pre)); continue; }
    // alone: at each click the theme's scripts search the whole page
    d.body.replaceChildren(block);
    copied = null; button.click();
    for (let i = 0; i < 20 && copied === null; i++) await wait(1);
    const prompts = all.split("\n").filter(l => /^(>>> |\.\.\. )/.test(
        l)).map(l => l.slice(4)).join("\n");
    if (copied === null || copied.trim() != (prompts || all).trim()) wrong.push(
        "copies " + JSON.stringify(copied) + " from " + name(pre));
  }
  await null;       // observers of the body look at it while it is small
  d.body.replaceChildren(...whole);
  return answer;
};
