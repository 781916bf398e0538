// What a figure to drag shows after each step: a slider's name and value for
// each that is moved, or the selector of a button.
(steps) => {
  const root = document.querySelector(".live");
  const move = (name, value) => {
    const slider = root.querySelector(name ? `input[name=${name}]` : "input");
    slider.value = value;
    slider.dispatchEvent(new Event("input"));
  };
  // within the axes, which are an SVG in the panel's
  const paths = (panel, which) => [...panel.querySelectorAll(
      ":scope svg path")].filter(path => path.matches(which)).map(
          path => path.getAttribute("d"));
  const panels = [...root.querySelectorAll(".panels > svg")];
  const of = which => Object.fromEntries(panels.map(
      panel => [panel.getAttribute("class"), paths(panel, which)]));
  return steps.map(step => {
    if (typeof step === "string") root.querySelector(step).click();
    else for (const name in step) move(name, step[name]);
    const sliders = [...root.querySelectorAll("input")];
    return {...Object.fromEntries([...root.querySelectorAll("output")].map(
        o => [o.name, o.value])), sliders: sliders.map(i => Number(i.value)),
        text: sliders[0].getAttribute("aria-valuetext"), paths: of("*"),
        dots: of("[style*=round]"),
        drawn: root.querySelector(".panels").innerHTML.length};
  });
};
