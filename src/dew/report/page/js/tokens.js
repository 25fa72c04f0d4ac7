// The tokens behind a bar, a cell or a word: a list with links to their groups.

const MOST_TOKENS = 100;
const FIRST_ROWS_OF_TOKENS = 25; // before the page is painted

/** The trained tokens of a group that pass the test: {place, group, i, t, H}. */
function tokensIn(place, group, test) {
  const found = [];
  group.answers.forEach((answer, i) => {
    for (let t = 0; t < answer.tokens.length; t++)
      if (answer.live[t] && test(answer, t, group)) found.push({ place, group, i, t, H: answer.entropy?.[t] });
  });
  return found;
}

const tokenAddress = ({ place, i, t }) => `${addressOf(place)}&token=${i + 1}.${t + 1}`;

function tokenRow(found) {
  const { group, i, t } = found;
  const answer = group.answers[i];
  const around = (from, to) => visible(answer.tokens.slice(Math.max(0, from), Math.max(0, to)).join('')).replace(/\s+/g, ' ');
  return h(
    'tr',
    {},
    h('td', {}, h('a', { href: tokenAddress(found) }, `step ${whole(group.step)} · group ${group.group}`)),
    h('td', {}, answer.correct ? '✓' : '✗'),
    h('td', { class: 'context' }, around(t - 6, t).slice(-60), h('mark', {}, brief(answer.tokens[t]).slice(0, 60)), around(t + 1, t + 6).slice(0, 60)),
    h('td', {}, answer.entropy ? number(answer.entropy[t]) : '–'),
    h('td', {}, answer.advantage ? number(answer.advantage[t]) : '–'),
  );
}

/** The number at place k if the list were sorted; reorders it (Hoare's selection, many times faster than sorting). */
function kth(list, k) {
  let [low, high] = [0, list.length - 1];
  while (low < high) {
    const pivot = list[(low + high) >> 1];
    let [i, j] = [low, high];
    while (i <= j) {
      while (list[i] < pivot) i++;
      while (list[j] > pivot) j--;
      if (i > j) break;
      const held = list[i];
      list[i++] = list[j];
      list[j--] = held;
    }
    if (k <= j) high = j;
    else if (k >= i) low = i;
    else break;
  }
  return list[k];
}

/** One tenth of the tokens by increasing entropy, divided as numpy.array_split does. */
function tenthOf(found, tenth) {
  const values = new Float64Array(found.length);
  for (let k = 0; k < found.length; k++) values[k] = found[k].H; // several times faster than Float64Array.from
  const [size, extra] = [Math.floor(found.length / 10), found.length % 10];
  const from = tenth * size + Math.min(tenth, extra);
  const count = size + (tenth < extra ? 1 : 0);
  if (!count) return [];
  const [low, high] = [kth(values, from), kth(values, from + count - 1)];
  const near = found.filter(({ H }) => H >= low && H <= high).sort((a, b) => a.H - b.H);
  const before = from - values.reduce((n, H) => n + (H < low), 0); // tokens with the same entropy in the tenth before
  return near.slice(before, before + count);
}

/** Open the list, of one period of training if given; with `tenth`, of one tenth of the tokens by increasing entropy. */
async function openTokens(title, r, test, { period = null, tenth = null } = {}) {
  const box = document.getElementById('tokens');
  const close = h('button', { class: 'small close', onclick: () => box.close(), 'aria-label': 'Close' }, '✕');
  const count = h('p', { class: 'quiet' }, 'Searching …');
  const body = h('tbody', { onclick: (event) => event.target.closest('a') && box.close() });
  const names = ['group', 'outcome', 'token', 'entropy', 'credit'];
  const head = h('thead', {}, h('tr', {}, names.map((name) => h('th', { scope: 'col' }, name))));
  const table = h('table', { class: 'token-table' }, head, body);
  const region = h('div', { class: 'scroll-x', tabindex: 0, role: 'region', 'aria-label': 'Tokens', 'aria-busy': 'true' }, table);
  box.replaceChildren(close, h('h2', {}, title), count, region);
  box.showModal();
  const places = view.all.filter(({ r: run, head }) => run === r && (!period || inPeriod(period, head.step)));
  const all = [];
  const chosen = () => (tenth !== null && all.length ? tenthOf(all, tenth) : all);
  let end = performance.now() + SLICE;
  for (const [k, place] of places.entries()) {
    for (const { n } of places.slice(k, k + 8)) groupAt(n); // unpacked while this one is searched
    for (const found of tokensIn(place, await groupAt(place.n), test)) all.push(found);
    if (performance.now() < end) continue;
    if (!body.firstChild) body.append(...chosen().slice(0, FIRST_ROWS_OF_TOKENS).map(tokenRow));
    count.textContent = `Searching … ${k + 1} of ${plural(places.length, 'group')}`;
    await painted();
    if (!table.isConnected) return; // closed, or another list is open
    end = performance.now() + SLICE;
  }
  const found = chosen();
  const shown = found.slice(0, MOST_TOKENS);
  const csv = () => [
    ['step', 'group', 'answer', 'position', 'correct', 'token', 'entropy', 'advantage'],
    ...found.map(({ group, i, t }) => {
      const { correct, tokens, entropy, advantage } = group.answers[i];
      return [group.step, group.group, i + 1, t + 1, correct, tokens[t], entropy?.[t], advantage?.[t]];
    }),
  ];
  const more = shown.length < found.length ? `, the first ${shown.length} are shown` : '';
  count.replaceChildren(`${plural(found.length, 'token')}${more} `, ...saveButtons('tokens', csv).filter(Boolean));
  body.replaceChildren(...shown.slice(0, FIRST_ROWS_OF_TOKENS).map(tokenRow));
  await painted();
  body.append(...shown.slice(FIRST_ROWS_OF_TOKENS).map(tokenRow));
  region.removeAttribute('aria-busy');
}
