// Where the first result leads of each search that the address names: Sphinx
// makes the first, this the others in the same page.
async (w, d) => {
  const box = d.querySelector("#search-results"), found = [],
      search = w.eval("Search"), [, ...others] = new URLSearchParams(
      w.location.search).getAll("q"),
      settings = w.eval("DOCUMENTATION_OPTIONS"),
      finished = () => /Search finished/.test(box.textContent);
  settings.SHOW_SEARCH_SUMMARY = false;     // for which each page is read
  for (const words of ["", ...others]) {
    if (words) {
      box.replaceChildren();
      // where the score looks for what is asked
      w.history.replaceState(null, "", "?" + new URLSearchParams({q: words}));
      search.performSearch(words);
    }
    for (let i = 0; i < 1000 && !finished(); i++) await wait(5);
    found.push(box.querySelector("li a").getAttribute("href"));
  }
  return found;
};
