// Sphinx's scores, but that a page comes first whose title has the words that
// are asked for, and the page of all functions last.
var Scorer = {
  score: ([page, title, , , score]) => {
    const asked = new URLSearchParams(location.search).get("q") || "";
    const at = title.split(" > ")[0].toLowerCase().indexOf(
        asked.trim().toLowerCase());
    return score + (at < 0 ? 0 : at ? 10 : 20) - (page === "nbs/api" ? 20 : 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0, title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
