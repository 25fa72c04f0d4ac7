// The table of groups: sorted, narrowed by run, outcome and text, walked through by keys.

const FIRST_ROWS = 45; // around the open group, more than are in sight; further rows are added by scrolling
const NEAR_END = 150; // pixels

const isMixed = ({ head }) => head.correct > 0 && head.correct < head.answers;
const share = ({ head }) => head.correct / Math.max(1, head.answers);

const COLUMNS_OF_GROUPS = [ // name, heading, what it is sorted by, explanation
  ['run', 'run', (g) => g.r, 'the run'],
  ['step', 'step', (g) => g.head.step * 1e6 + g.head.group, 'training step and group'],
  ['correct', 'correct', share, 'correct answers: the difficulty for this policy'],
  ['spread', 'spread', (g) => g.head.spread, 'how unevenly an answer\'s credit is distributed; 0 as in GRPO'],
  ['flipped', 'flipped', (g) => g.head.flipped, 'tokens with credit of the wrong sign for their answer'],
  ['sure', 'H ≈ 0', (g) => g.head.sure, 'share of tokens with an entropy below 0.01 nats'],
];

const GROUPS_WITH = {
  all: ['all', () => true],
  mixed: ['correct and wrong answers', isMixed],
  right: ['all correct', (g) => g.head.correct === g.head.answers],
  wrong: ['all wrong', (g) => g.head.correct === 0],
  flipped: ['flipped tokens', (g) => g.head.flipped > 0],
};

/** Every group of these runs: {r, head, n}; n counts over all runs of the page, as the packed lines do. */
function allGroups(runs) {
  let n = 0;
  const places = (run) => run.groups.map((head) => ({ r: runs.indexOf(run), head, n: n++ }));
  return view.whole.runs.flatMap(places).filter(({ r }) => r >= 0);
}

/** The group that shows most of what entropy weighting does; without any, a mixed one. */
const mostTelling = () =>
  view.all.reduce((best, g) => (g.head.telling > best.head.telling ? g : best), view.all.find(isMixed) || view.all[0]);

function listed() {
  const [, fits] = GROUPS_WITH[state.with] || GROUPS_WITH.all;
  const isOfRun = (g) => !state.in || g.r === Number(state.in) - 1;
  const found = view.all.filter((g) => fits(g) && isOfRun(g) && (!view.hits || view.hits.has(g.n)));
  const up = state.by.startsWith('-');
  const column = COLUMNS_OF_GROUPS.find(([key]) => key === state.by.replace('-', ''));
  return column ? found.sort((a, b) => (up ? 1 : -1) * (column[2](a) - column[2](b))) : found;
}

function groupRow(g) {
  const { head } = g;
  const place = { href: addressOf(g), tabindex: -1 };
  const bar = h('span.share', { 'aria-hidden': 'true' });
  return h('tr', { 'data-n': g.n },
    manyRuns() && h('td', runMark(g.r)),
    h('td', h('a.group-link', place, `${whole(head.step)} · ${head.group}`)),
    h('td', { '--right': `${100 * share(g)}%` }, `${head.correct}/${head.answers}`, bar),
    h('td', head.spread ? head.spread.toFixed(2) : '–'),
    h('td', { class: head.flipped ? 'has-flips' : null }, head.flipped ? whole(head.flipped) : '–'),
    h('td', percent(head.sure)),
    h('td.group-prompt', { title: visible(head.prompt) }, visible(plain(head.prompt)).slice(0, 160)),
  );
}

/** A column's head: a click sorts by it, largest first; a second click reverses. */
function columnHead([key, label, , note]) {
  const order = { [key]: 'descending', [`-${key}`]: 'ascending' }[state.by];
  const sort = setting('by', () => {
    groupList();
    view.parts.list.querySelector(`[data-by="${key}"]`)?.focus();
  });
  const arrow = { descending: ' ↓', ascending: ' ↑' }[order] || '';
  const onclick = () => sort(order === 'descending' ? `-${key}` : key);
  const button = h('button.sort', { title: note, 'data-by': key, onclick }, label, arrow);
  return h('th', { scope: 'col', 'aria-sort': order }, button);
}

function groupList() {
  const found = listed();
  const { list, count } = view.parts;
  view.parts.listed = tableLook();
  const open = ({ target }) => target.closest('a') || target.closest('tr')?.querySelector('a').click();
  const body = h('tbody', { onclick: open });
  let from = Math.max(0, found.findIndex(({ n }) => n === view.place?.n) - 20);
  let to = from;
  const grow = () => body.append(...found.slice(to, (to += FIRST_ROWS)).map(groupRow));
  grow();
  const heads = COLUMNS_OF_GROUPS.slice(manyRuns() ? 0 : 1).map(columnHead);
  refill(list,
    h('table.group-table', h('thead', h('tr', heads, h('th', { scope: 'col' }, 'prompt'))), body),
    !found.length && h('p.quiet', 'No matching groups.'),
  );
  list.onscroll = () => {
    if (list.scrollTop + list.clientHeight + NEAR_END > list.scrollHeight) grow();
    if (!from || list.scrollTop > NEAR_END) return;
    const before = list.scrollHeight;
    body.prepend(...found.slice(Math.max(0, from - FIRST_ROWS), from).map(groupRow));
    from = Math.max(0, from - FIRST_ROWS);
    list.scrollTop += list.scrollHeight - before;
  };
  const some = `${whole(found.length)} of ${plural(view.all.length, 'group')}`;
  count.textContent = found.length === view.all.length ? `All groups (${whole(found.length)})` : some;
  markCurrent();
}

function markCurrent() {
  const { list } = view.parts;
  const old = list.querySelector('[aria-current]');
  old?.removeAttribute('aria-current');
  old?.querySelector('a').setAttribute('tabindex', -1);
  const current = list.querySelector(`tr[data-n="${view.place?.n}"]`) || list.querySelector('tbody tr');
  if (!current) return;
  current.querySelector('a').setAttribute('tabindex', 0); // one tab stop for the whole table
  if (Number(current.dataset.n) !== view.place?.n) return;
  current.setAttribute('aria-current', 'true');
  list.scrollTop = current.offsetTop - list.clientHeight / 2;
}

/** Text search through prompts and answers: unpacks group after group and keeps those that hold the words. */
async function search(words) {
  set({ q: words });
  const wanted = words.trim().toLowerCase();
  const hits = new Set();
  if (wanted) view.parts.count.textContent = 'Searching …';
  for (const { n } of wanted ? view.all : []) {
    const group = await groupAt(n);
    if (state.q !== words) return;
    const texts = [group.prompt, group.gold || '', ...group.answers.map((a) => a.tokens.join(''))];
    if (texts.some((text) => text.toLowerCase().includes(wanted))) hits.add(n);
  }
  view.hits = wanted ? hits : null;
  groupList();
  if (view.group) showGroup();
}

/** The group that is `by` places further in the table. */
function neighbour(by) {
  const found = listed();
  const at = found.findIndex(({ n }) => n === view.place?.n);
  return found[(at + by + found.length) % found.length];
}

function turnGroup(by) {
  const next = neighbour(by);
  if (!next) return;
  history.pushState(null, '', addressOf(next)); // without the search for an element of that name
  follow();
}

function picker({ runs }) {
  const { parts } = view;
  let waiting = 0;
  const look = { type: 'search', id: 'search', placeholder: 'Search ( / )', 'aria-label': 'Search prompts, answers' };
  const oninput = ({ target }) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => search(target.value), 200);
  };
  const box = h('input', { ...look, onfocus: () => unpackAll(), oninput });
  const outcomes = Object.entries(GROUPS_WITH).map(([name, [label]]) => [name, label]);
  const filters = h('div.controls');
  parts.fillFilters = () => {
    box.value = state.q;
    refill(filters, box,
      choice('With', outcomes, state.with, setting('with', groupList)),
      manyRuns() && chooseRun('in', state.in, [...runs.keys()], groupList, [['', 'all runs']]),
      h('span.buttons',
        h('button.small', { onclick: () => turnGroup(-1), title: 'Previous group (k)' }, '‹ back'),
        h('button.small', { onclick: () => turnGroup(1), title: 'Next group (j)' }, 'next ›'),
      ),
    );
  };
  const some = runs.some(({ sample: { groups: n, of, files, files_of: all } }) => n < of || files < all);
  const note = some && h('p.quiet', 'A sample of the recorded groups.');
  return h('details.picker', { open: isWide() }, parts.count, filters, parts.list, note);
}
