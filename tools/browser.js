// What a reader would find broken on a page, printed to the console. The
// wrapper of browser.py has `settings`, a frame, and the function `asked`.
const pages = settings.pages, widths = settings.widths,
    frame = document.getElementById("frame"),
    wait = ms => new Promise(done => setTimeout(done, ms));
const luminance = c => { const [r, g, b] = c.map(v => v / 255).map(v =>
    v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const contrast = (a, b) => { const [x, y] = [luminance(a),
    luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] +
    below[i] * (1 - top[3]));
const canvas = document.createElement("canvas").getContext("2d",
    {willReadFrequently: true}), known = new Map();

// whatever notation the style uses, as red, green, blue, alpha
function rgba(colour) {
  if (!known.has(colour)) {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const d = canvas.getImageData(0, 0, 1, 1).data;
    known.set(colour, [d[0], d[1], d[2], d[3] / 255]);
  }
  return known.get(colour);
}
// of elements, in the mode that is looked at
const behindOf = new Map(), opacityOf = new Map();
function background(e) {
  if (!e) return [255, 255, 255];
  if (!behindOf.has(e)) { const own = rgba(getComputedStyle(e).backgroundColor);
      behindOf.set(e, own[3] == 1 ? own.slice(0, 3) : over(own,
      background(e.parentElement))); }
  return behindOf.get(e);
}
function opacity(e) {
  if (!e) return 1;
  if (!opacityOf.has(e)) opacityOf.set(e,
      Number(getComputedStyle(e).opacity) * opacity(e.parentElement));
  return opacityOf.get(e);
}
const shown = e => { const r = e.getBoundingClientRect();
    return r.width > 0 && r.height > 0 && e.checkVisibility({visibilityProperty:
    true}); };
const name = e => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") +
    [...e.classList].map(c => "." + c).join("") + " " + JSON.stringify(
    (e.textContent || "").trim().slice(0, 50));

function equations(d) {
  const all = [...d.querySelectorAll(".math")], bad = [];
  for (const e of all) if (!e.querySelector("mjx-container")) bad.push(
      "not typeset: " + name(e));
  // MathJax shows an unknown command in red and calls it no error
  const red = ["mjx-merror", "mjx-container [mathcolor=red]",
               "mjx-container [style*='color: red']"].join(", ");
  for (const e of d.querySelectorAll(red))
    bad.push("TeX error: " + name(e.closest(".math") || e) + " " +
        (e.getAttribute("data-mjx-error") || ""));
  return [all.length, bad];
}
function figures(d) {
  const all = [...d.querySelectorAll("svg.figure-svg, img")], bad = [];
  for (const e of all) {
    const r = e.getBoundingClientRect(),
        folded = e.closest("details:not([open]), .toggle-hidden");
    const there = e.tagName == "IMG" ? e.complete && e.naturalWidth : folded ||
        r.width && r.height;
    if (!there) bad.push("figure missing: " + name(e) + " " +
        (e.getAttribute("src") || ""));
    // of its own size: text of 9.5 points is then 6 points high; a wider one
    // scrolls in its box
    const natural = parseFloat(e.style.getPropertyValue("--natural")) * 4 / 3;
    if (r.width && r.width < settings.legible * natural) bad.push(
        "figure too small: " + (r.width / natural).toFixed(2) +
        " of its size: " + name(e));
  }
  return [all.length, bad];
}
// what sticks out, unless a box around it scrolls or cuts it
function wide(d) {
  const width = Number(frame.width);
  if (d.documentElement.scrollWidth <= width) return [];
  const cut = e => { for (let a = e.parentElement; a && a != d.body;
      a = a.parentElement) if (getComputedStyle(a).overflowX !=
      "visible") return true; };
  const out = [...d.body.querySelectorAll("*")].filter(e =>
      e.getBoundingClientRect().right > width + 1 && !cut(e));
  return ["scrolls sideways: " + d.documentElement.scrollWidth + " px: " +
      out.slice(-3).map(name).join("; ")];
}
// [element, its box, its text if it is one] of what is read: texts, formulas,
// figures
function leaves(root, d) {
  const found = [], range = d.createRange(), walker = d.createTreeWalker(root,
      NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    const aside = "svg, script, style, mjx-container, .headerlink, "
                  + ".visually-hidden, .sr-only";
    if (!walker.currentNode.data.trim() || e.closest(aside)) continue;
    if (!shown(e)) continue;
    range.selectNodeContents(walker.currentNode);
    found.push([e, range.getBoundingClientRect(), walker.currentNode]);
  }
  for (const e of root.querySelectorAll(
      "mjx-container > mjx-math, svg.figure-svg, img")) if (
      shown(e)) found.push([e, e.getBoundingClientRect()]);
  return found;
}
// What is painted, not what boxes say: browsers differ in how far the boxes of
// a formula reach beyond its glyphs.
// of a text in the font of an element: how far its ink, and the font, reach
// above and below the line
function metrics(e, pseudo, text) {
  const s = getComputedStyle(e, pseudo), d = e.ownerDocument,
      pen = d.pen = d.pen || d.createElement("canvas").getContext("2d");
  // it rounds to whole pixels
  pen.font = [s.fontStyle, s.fontWeight, 16 * parseFloat(s.fontSize) + "px",
      s.fontFamily].join(" ");
  const m = pen.measureText(text), of = side => [m["actualBoundingBox" + side],
      m["fontBoundingBox" + side]].map(v => v / 16);
  return {ascent: of("Ascent"), descent: of("Descent")};
}
// of MathJax: a character in a line of height 0, below the padding of its
// pseudo-element
function glyph(e) {
  const s = getComputedStyle(e, "::before"), text = /^"(.*)"$/.exec(s.content);
  if (!text || !text[1].trim()) return [];
  const m = metrics(e, "::before", text[1].replace(/\\(.)/g, "$1"));
  const base = e.getBoundingClientRect().top + parseFloat(s.paddingTop) +
      (m.ascent[1] - m.descent[1]) / 2;
  return [{top: base - m.ascent[0], bottom: base + m.descent[0]}];
}
// of a text: the height of its letters in each of its lines
function lines(e, node) {
  const range = e.ownerDocument.createRange(), m = metrics(e, null, node.data);
  range.selectNodeContents(node);
  return [...range.getClientRects()].map(r => ({top: r.top + Math.max(0,
      m.ascent[1] - m.ascent[0]), bottom: r.bottom - Math.max(0,
      m.descent[1] - m.descent[0])}));
}
function ink(e, node) {     // [{top, bottom}] of what is painted of a leaf
  if (node) return lines(e, node);
  if (e.tagName != "MJX-MATH") return [e.getBoundingClientRect()];
  const found = [];
  for (const part of e.querySelectorAll("*")) {
    if (part.parentElement.closest("mjx-stretchy-v, mjx-stretchy-h")) continue;
    const s = getComputedStyle(part), r = part.getBoundingClientRect();
    const text = [...part.childNodes].filter(n => n.nodeType == 3 &&
        n.data.trim());
    if (part.matches("mjx-stretchy-v, mjx-stretchy-h") ||
        rgba(s.backgroundColor)[3] > 0) found.push(r);
    if (parseFloat(s.borderTopWidth) > 0) found.push({top: r.top,
        bottom: r.top + parseFloat(s.borderTopWidth)});
    if (parseFloat(s.borderBottomWidth) > 0) found.push(
        {top: r.bottom - parseFloat(s.borderBottomWidth), bottom: r.bottom});
    if (part.tagName == "MJX-C") found.push(...glyph(part));
    for (const n of text) found.push(...lines(part, n));
  }
  return found;
}
// what may cut or frame its content; null if it is no box
function boxOf(a) {
  const s = getComputedStyle(a), box = a.getBoundingClientRect(),
      hides = o => o == "hidden" || o == "clip";
  if (s.display == "inline" || s.display == "contents" ||
      a.closest("mjx-math") || !box.width) return null;
  return {box, hidesX: hides(s.overflowX), hidesY: hides(s.overflowY),
      scrollsY: /auto|scroll/.test(s.overflowY),
    scrollsX: /auto|scroll/.test(s.overflowX) && a.scrollWidth > a.clientWidth +
        1,
    seen: rgba(s.backgroundColor)[3] > 0 ||
        parseFloat(s.borderRightWidth) > 0 && s.borderRightStyle != "none"};
}
// what a box cuts off without a scrollbar of its own, or what sticks out of a
// box that is seen
// a reader at a desk does not scroll sideways, not even within a box
const DESK = 1280;
function scrolled(d) {
  const bad = [];
  for (const e of d.querySelectorAll(
      "article :is(pre, table, .cell_output, .math, mjx-container)")) {
    const s = getComputedStyle(e);
    if (!shown(e) || !/auto|scroll/.test(s.overflowX)) continue;
    const line = e.matches("span.math, mjx-container:not([display])");
    // a formula within a line: its box reaches a little beyond its ink
    const inner = e.querySelector("mjx-math");
    const over = line ? inner && inner.getBoundingClientRect().right -
        e.getBoundingClientRect().right - 2 : e.scrollWidth - e.clientWidth;
    if (over > 1) bad.push("wider than the column by " + Math.round(over) +
        " px: " + name(e) + " in #" + (e.closest("[id]") || d.body).id);
  }
  return bad;
}
function cut(d) {
  const bad = new Set(), boxes = new Map();
  for (const link of d.querySelectorAll(
      "h1 .headerlink, h2 .headerlink, h3 .headerlink")) {
    const range = d.createRange(), r = link.getBoundingClientRect();
    range.selectNodeContents(link.parentElement); range.setEndBefore(link);
    if (r.width && r.top > range.getBoundingClientRect().bottom - 2) bad.add(
        "an empty line, for the mark of a link only: " +
        name(link.parentElement));
  }
  for (const [e, r, node] of leaves(d.querySelector("article") || d.body, d)) {
    let painted = null;
    for (let a = e; a && a.tagName != "BODY"; a = a.parentElement) {
      if (!boxes.has(a)) boxes.set(a, boxOf(a));
      const b = boxes.get(a);
      if (!b) continue;
      const {box, scrollsX, scrollsY} = b;
      // also where it scrolls sideways: that must not hide part of its height
      if (b.hidesY) {
        painted = painted || ink(e, node);
        const top = box.top + a.clientTop, bottom = top + a.clientHeight;
        const below = Math.max(0, ...painted.map(k => k.bottom - bottom)),
            above = Math.max(0, ...painted.map(k => top - k.top));
        if (below > 1) { bad.add("cut below: " + name(e) + " in " + name(a) +
            ", " + below.toFixed(1) + " px"); break; }
        if (above > 1) { bad.add("cut above: " + name(e) + " in " + name(a) +
            ", " + above.toFixed(1) + " px"); break; }
      }
      if (scrollsY || scrollsX) break;
      if (b.hidesX && (r.right > box.right + 1 || r.left < box.left - 1)) {
          bad.add("cut off: " + name(e) + " in " + name(a)); break; }
      if (b.seen && r.right > box.right + 1) {
          bad.add("sticks out of its box by " +
          Math.round(r.right - box.right) + " px: " + name(e) + " in " +
          name(a)); break; }
    }
  }
  for (const a of (d.querySelector("article") || d.body).querySelectorAll(
      ":not(mjx-container *, svg, svg *, .highlight span)")) {
    const s = getComputedStyle(a);
    if (s.scrollbarWidth == "none" || s.overflowX == "visible" &&
        s.overflowY == "visible") continue;
    // within a line, or up and down, a few pixels are a matter of rounding and
    // not of content
    const x = a.scrollWidth - a.clientWidth,
        y = a.scrollHeight - a.clientHeight;
    if (/auto|scroll/.test(s.overflowX) && s.display.startsWith("inline") &&
        x > 0) bad.add("a scrollbar within a line: " + name(a));
    if (/auto|scroll/.test(s.overflowY) && y > 0 && y < 4) bad.add(
        "a scrollbar for " + y + " px: " + name(a));
  }
  return [...bad];
}
function wanted(e) {        // large text may have less contrast
  const s = getComputedStyle(e), size = parseFloat(s.fontSize);
  return size >= 24 || size >= 18.66 && Number(s.fontWeight) >= 700 ?
      Math.min(3, settings.contrast) : settings.contrast;
}
// What has the colours of another need not be styled anew in each mode: of a
// formula its thousand parts, of the tokens of one kind in a block of code all
// but the first.
function thin(d) {
  for (const e of d.querySelectorAll("mjx-container")) e.textContent = "x";
  const kinds = new Map();
  for (const e of d.querySelectorAll(
      ".highlight span:not([style], [id], :has(*))")) {
    const {parentElement: block, className: kind} = e;
    if (!kinds.has(block)) kinds.set(block, new Set());
    if (!e.textContent.trim() || kinds.get(block).has(kind)) e.remove();
    else kinds.get(block).add(kind);
  }
}
// the elements with text of their own, and the formulas, that are shown: the
// same in both modes
function coloured(d, paper) {
  const kept = paper ? "onPaper" : "onScreen";
  if (d[kept]) return d[kept];
  const walker = d.createTreeWalker(d.body, NodeFilter.SHOW_TEXT);
  const texts = new Set();
  const aside = "svg, script, style, noscript, mjx-container, "
                + ".headerlink, .tooltip, :disabled";
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || texts.has(e)) continue;
    if (!e.closest(aside)) texts.add(e);
  }
  return d[kept] = [[...texts].filter(shown),
      [...d.querySelectorAll("mjx-container")].filter(shown)];
}
function invisible(d, mode, paper) {
  d.documentElement.dataset.mode = d.documentElement.dataset.theme = mode;
  behindOf.clear(); opacityOf.clear();
  const bad = new Map(), where = paper ? "print from " + mode : mode;
  // a printer prints backgrounds or leaves them out
  const worst = (e, c) => {
    const all = [background(e), ...(paper ? [[255, 255, 255]] : [])].map(
        behind => [contrast(over([...c.slice(0, 3), c[3] * opacity(e)], behind),
        behind), behind]);
    return all.sort((p, q) => p[0] - q[0])[0];
  };
  const tell = (e, what, colour, limit) => {
    const [ratio, behind] = worst(e, rgba(colour));
    const key = what + colour + behind + e.tagName + e.className;
    if (ratio >= limit - 0.005 || bad.has(key)) return;
    bad.set(key, where + " mode: " + what + " " + colour + " on rgb(" +
        behind.map(Math.round) + "), contrast " + ratio.toFixed(2) + ": " +
        name(e));
  };
  const [texts, formulas] = coloured(d, paper);
  for (const e of texts) tell(e, "text", getComputedStyle(e).color, wanted(e));
  for (const e of formulas) tell(e.closest(".math") || e, "formula",
      getComputedStyle(e).color, wanted(e));
  for (const svg of d.querySelectorAll("svg.figure-svg")) {
    for (const e of svg.querySelectorAll("[style*='--pst-color-text-base']")) {
      const s = getComputedStyle(e), ink = s.fill != "none" &&
          e.getAttribute("style").includes("fill: var") ? s.fill : s.stroke;
      if (ink != "none") { tell(svg, "figure ink", ink,
          Math.min(3, settings.contrast)); break; }
    }
  }
  return [...bad.values()];
}
function onPaper(d) {       // the style sheets as a printer sees them
  const rules = list => { for (const rule of list) {
    if (rule.media && rule.cssRules) rule.media.mediaText = /print/.test(
        rule.media.mediaText) ? "all" : /screen/.test(rule.media.mediaText) ?
        "not all" : rule.media.mediaText;
    if (rule.cssRules) rules(rule.cssRules);
  } };
  for (const sheet of d.styleSheets) {
      if (/print/.test(sheet.media.mediaText)) sheet.media.mediaText = "all";
  rules(sheet.cssRules); }
}
const STILL = "<style>* { transition: none !important; "
    + "animation: none !important }</style>";
async function open(page) {
  const loaded = new Promise(done => { frame.onload = done; frame.src = page; });
  // before anything is laid out
  while (frame.contentDocument.URL != page || !frame.contentDocument.head)
    await wait(1);
  frame.contentDocument.head.insertAdjacentHTML("afterbegin", STILL);
  await loaded;
  const w = frame.contentWindow, d = frame.contentDocument;
  if (w.MathJax && w.MathJax.startup) await w.MathJax.startup.promise;
  await d.fonts.ready;
  await wait(50);
  return [w, d];
}
// opened once, as wide as the first width, then made as wide as the others
async function look(page) {
  console.log("@page " + page);
  frame.width = widths[0];
  const [w, d] = await open(page), problems = [];
  const [maths, badMaths] = equations(d),
      folds = [...d.querySelectorAll("details:not([open])")],
      hidden = [...d.querySelectorAll(".toggle-hidden")];
  let drawn = 0;
  for (const width of widths) {
    if (frame.width != width) { frame.width = width; await wait(50); }
    const [count, badFigures] = figures(d), found = [...badFigures, ...wide(d)];
    folds.forEach(e => e.open = true);
    hidden.forEach(e => e.classList.remove("toggle-hidden"));
    found.push(...wide(d), ...cut(d), ...(width < DESK ? [] : scrolled(d)));
    problems.push(...found.map(p => width + " px: " + p));
    drawn = count;
    if (width == widths.at(-1)) continue;
    folds.forEach(e => e.open = false);
    hidden.forEach(e => e.classList.add("toggle-hidden"));
  }
  const requested = w.performance.getEntriesByType("resource").map(r =>
      r.name).filter(n => /^(https?|wss?):/.test(n)).map(n =>
      "asks the network: " + n);
  problems.push(...badMaths, ...requested);
  const answer = await asked(w, d);
  thin(d);
  problems.push(...invisible(d, "light"), ...invisible(d, "dark"));
  onPaper(d);
  problems.push(...invisible(d, "light", true), ...invisible(d, "dark",
      true));
  console.log("@found " + JSON.stringify({equations: maths, figures: drawn,
      answer, problems: [...new Set(problems)]}));
}
async function ask(page) {
  console.log("@page " + page);
  frame.width = widths[0];
  const [w, d] = await open(page);
  console.log("@found " + JSON.stringify({answer: await asked(w, d)}));
}
(async () => {
  for (const page of pages)
    await {look, ask}[settings.what](page).catch(
        e => console.log("@found " + JSON.stringify({equations: 0, figures: 0,
            problems: ["not inspected: " + e]})));
  console.log("@done");
})();
