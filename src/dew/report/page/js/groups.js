// Choose a group in the table; read its answers, by position, by method, or beside the same prompt elsewhere.

const available = (group) => Object.keys(SIGNALS).filter((name) => group.answers.some((answer) => answer[name]));

async function openGroup(place) {
  const other = view.place !== place || !view.group;
  view.place = place;
  const group = await groupAt(place.n);
  if (view.place !== place) return;
  view.group = group;
  if (other) view.column = null;
  const [i, t] = state.token.split('.').map((k) => Number(k) - 1);
  view.pinned = group.answers[i] && t < group.answers[i].tokens.length ? { i, t } : null;
  if (!view.parts.list.querySelector(`tr[data-n="${place.n}"]`)) groupList();
  else markCurrent();
  if (view.drawn !== groupLook()) await showGroup(true);
  else markPinned(true);
  tell(view.pinned);
  remember();
  idle().then(() => groupAt((neighbour(1) || place).n)); // unpacked in advance
}

/** The prompt by turns; system turns and the raw text with its markup are folded. */
function promptBlock(prompt) {
  const turns = turnsOf(prompt);
  const markup = turns.some(({ role }) => role) || plain(prompt) !== prompt.trim();
  const block = ({ role, text }) =>
    role === 'system'
      ? h('details', h('summary', `system (${plural(text.length, 'character')})`), marked(visible(text)))
      : h('div', role && role !== 'user' && h('span.role', `${role} `), marked(visible(text)));
  const body = turns.length ? turns.map(block) : '(the prompt was not recorded)';
  const raw = markup && h('details.raw', h('summary', 'with chat markup'), visible(prompt));
  return region('div.prompt', 'Prompt', body, raw);
}

const ofRun = (r) => (manyRuns() ? ` of ${runName(r)}` : '');

function groupHeading(group) {
  const { head, r } = view.place;
  return h('header.group-title',
    h('h2', runMark(r), `Step ${whole(group.step)}, group ${group.group}${ofRun(r)}`),
    promptBlock(group.prompt),
    h('p.facets',
      group.gold !== null && h('span', 'gold answer ', h('code', brief(group.gold))),
      h('span', h('b', `${head.correct} of ${head.answers}`), ' correct'),
      group.algorithm && h('span', visible(String(group.algorithm))),
      head.flipped > 0 && h('b.flips', plural(head.flipped, 'flipped token')),
    ),
  );
}

function answersCsv(group) {
  const names = available(group);
  const row = (answer, i, t) => [
    i + 1, answer.correct, answer.reward, t + 1, answer.tokens[t], isFlipped(answer, t),
    ...names.map((name) => answer[name]?.[t]),
  ];
  const rows = group.answers.flatMap((answer, i) => answer.tokens.map((_, t) => row(answer, i, t)));
  return [['answer', 'correct', 'reward', 'position', 'token', 'flipped', ...names], ...rows];
}

function groupControls(group) {
  const button = (mode) => {
    const look = { 'aria-pressed': String(mode === state.mode), 'data-mode': mode };
    return h('button', { ...look, onclick: () => setting('mode', showGroup)(mode) }, MODES[mode][0]);
  };
  const options = (label, name, values, value = state[name]) => choice(label, values, value, setting(name, showGroup));
  const signals = available(group).map((name) => [name, SIGNALS[name].label]);
  return h('div.controls', { id: 'group-controls' },
    h('div.segments', { role: 'group', 'aria-label': 'View' }, modes().map(button)),
    state.mode !== 'methods' && [
      options('Colour', 'signal', signals, chosenSignal(group)),
      h('details.more-controls',
        remembered('more'),
        h('summary', 'More'),
        options('Show', 'only', { all: 'all answers', correct: 'correct only', wrong: 'wrong only' }),
        options('Sort', 'sort', Object.entries(SORTS).map(([name, [label]]) => [name, label])),
        saveButtons(`step-${group.step}-group-${group.group}`, () => answersCsv(group)),
      ),
    ],
  );
}

const MODES = {
  text: ['Answers', answersView],
  columns: ['Columns', columnsView],
  methods: ['Compare', answersView, () => rulesOf(view.group).length > 1],
  same: ['Same prompt', sameView, () => sameGroups().length > 1],
}; // name, how it is drawn, whether the open group has it

const modes = () => Object.keys(MODES).filter((mode) => MODES[mode][2]?.() ?? true);

/** Every group of the page with the prompt of the open one, by run and step. */
const sameGroups = () => view.all.filter((g) => g.head.same === view.place.head.same);

/** The same prompt in other runs and steps, side by side. */
async function sameView() {
  const places = sameGroups();
  const loaded = await Promise.all(places.slice(0, 6).map(({ n }) => groupAt(n)));
  const columns = loaded.map((group, k) => {
    const { r, head } = places[k];
    const cards = answerCards(group);
    for (const card of cards) card.removeAttribute('data-i'); // tokens of other groups have no derivation here
    const title = `step ${whole(group.step)}, group ${group.group}${ofRun(r)}`;
    return h('section.same-column',
      h('h3', runMark(r), h('a', { href: addressOf(places[k]) }, title)),
      h('p.quiet', `${head.correct} of ${head.answers} correct`),
      cards,
    );
  });
  const left = places.length - loaded.length;
  return h('div',
    region('div.same.scroll-x', 'Groups with the same prompt', columns),
    left > 0 && h('p.quiet', `${plural(left, 'more group')} with this prompt.`),
  );
}

/** What the drawn group depends on, and the table of groups. */
const groupLook = () => [view.place.n, cardLook(), state.only, state.sort].join();
const tableLook = (of = state) => ['with', 'in', 'by', 'q'].map((name) => of[name]).join();

async function showGroup(scrolls) {
  const { group, parts } = view;
  if (!group) return;
  if (!modes().includes(state.mode)) state.mode = 'text';
  const isCompared = state.mode === 'methods';
  if (isCompared) takeDifference(group);
  view.scale = scaleOf(group);
  let body = MODES[state.mode][1](group);
  if (body instanceof Promise) body = await body;
  if (view.group !== group) return;
  const inside = parts.group.querySelector('.scroll-x')?.scrollLeft || 0;
  parts.page.classList.toggle('compares', state.mode === 'same');
  const { label, note } = SIGNALS[chosenSignal(group)];
  const scale = isCompared ? compareControls(group) : legend(view.scale, `${label}: ${note}`, view.place.head);
  refill(parts.about, groupHeading(group), groupControls(group), scale);
  if (parts.body.firstChild !== body) refill(parts.body, body);
  const wide = parts.group.querySelector('.scroll-x');
  if (wide && inside) wide.scrollLeft = inside;
  view.drawn = groupLook();
  markPinned(scrolls);
  drawVisible(); // of what is now in sight
}

function groups(report) {
  if (!view.all.length)
    return h('div.page', h('p.calm', 'This run recorded no answers, so there are no groups.'));
  const parts = (view.parts = {
    list: h('div.group-list'),
    count: h('summary'),
    about: h('div'),
    body: h('div'),
    panel: h('aside.panel', { 'aria-label': 'How the credit was computed' }),
  });
  parts.group = h('div.group', parts.about, parts.body);
  const page = (parts.page = h('div.groups', picker(report), parts.group, parts.panel));
  watchTokens(parts);
  tell(null);
  page.shown = () => {
    if (parts.listed === tableLook()) return;
    parts.fillFilters();
    if (state.q && !view.hits) search(state.q);
    else groupList();
  };
  return page;
}
