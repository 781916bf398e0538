// Sphinx's scores, but that what is asked for counts, word by word, where it
// stands in a page's headings, the rarer the more, and twice in its title; that a
// page comes first whose name, the title as far as a colon, is what is asked for
// or has it; and the page of all functions last.
var Scorer = {
  score: ([page, title, , , score]) => {
    const asked = (new URLSearchParams(location.search).get("q") || "")
        .trim().toLowerCase();
    const name = title.split(" > ")[0].split(":")[0].toLowerCase();
    const {docnames, titles, titleterms} = Search._index;
    const at = docnames.indexOf(page), stemmer = new Stemmer();
    const inTitle = splitQuery(titles[at].toLowerCase())
        .map(word => stemmer.stemWord(word));
    for (const word of Search._parseQuery(asked)[1]) {
      const pages = [titleterms[word] ?? []].flat();
      if (pages.includes(at)) score += (1 + inTitle.includes(word)) *
          Math.log(docnames.length / pages.length);
    }
    return score + (name.includes(asked) ? 30 * asked.length / name.length : 0)
        - (page === "nbs/api" ? 20 : 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0, title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
