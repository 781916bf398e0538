// Sphinx's scores, but that what is asked for counts, word by word and any two
// neighbours as one: as tools/ranking.py weighs it in the page, and where it
// stands in the page's headings, the rarer the more, and twice in its title; that
// a page comes first whose name, the title as far as a colon, is what is asked for
// or has it; and the page of all functions last.
var Scorer = {
  score: ([page, title, , , score]) => {
    const bare = text => text.toLowerCase().replace(
        /<span class="section-number">.*?<\/span>|<[^>]*>/g, "");
    const letters = text => bare(text).replace(/[^\p{L}\p{N}]/gu, "");
    const query = new URLSearchParams(location.search).get("q") || "";
    const name = letters(title.split(" > ")[0].split(":")[0]);
    const asked = letters(query), {docnames, titles, titleterms} = Search._index;
    const at = docnames.indexOf(page), letter = String.fromCharCode(48 + at);
    const stems = words => words.map(word => new Stemmer().stemWord(word));
    const words = splitQuery(query.toLowerCase()), inTitle = stems(
        splitQuery(bare(titles[at])));
    const joined = words.slice(1).map((word, i) => words[i] + word);
    for (const word of new Set(stems([...words, ...joined]))) {
      if (/^\d+$/.test(word)) continue;
      const pages = [titleterms[word] ?? []].flat();
      if (pages.includes(at)) score += (1 + inTitle.includes(word)) *
          Math.log(docnames.length / pages.length);
      const [on, weights] = Object.hasOwn(ranking, word) ? ranking[word] : ["", ""];
      if (on.includes(letter))
        score += (weights.charCodeAt(on.indexOf(letter)) - 48) / 50;
    }
    return score + (name.includes(asked) ? 30 * asked.length / name.length : 0)
        - (page === "nbs/api" ? 20 : 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0, title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
// Where few pages have all words, the ten best follow that have some.
const havingAll = Search.performTermsSearch;
Search.performTermsSearch = (words, excluded) => {
  const found = havingAll(words, excluded), some = new Map();
  for (const word of found.length < 10 ? words : [])
    for (const result of havingAll(new Set([word]), excluded))
      some.set(result[0], result.with(4, 0));
  for (const [page] of found) some.delete(page);
  return [...found, ...[...some.values()]
      .sort((a, b) => Scorer.score(b) - Scorer.score(a)).slice(0, 10)];
};
