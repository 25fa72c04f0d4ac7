// The page: unpack, draw the four views, follow the address, listen to the keyboard.

const VIEWS = {
  overview: ['Overview', overview],
  curves: ['Curves', curves],
  groups: ['Groups', groups],
  credit: ['Credit', spreadView],
};
const KEYS = [
  ['j  k', 'next and previous group'],
  ['1 … 7', 'colour by advantage, shaped reward, entropy, …'],
  ['v', 'answers, columns, methods, same prompt'],
  ['p', 'select the first token (or click any)'],
  ['← → ↑ ↓', 'move the selection'],
  ['Esc', 'clear the selection'],
  ['/', 'search'],
  ['t', 'light or dark theme'],
  ['?', 'this help'],
];
const sections = {};

/** Views are made when they are opened, or before that while the page is idle. */
function make(name) {
  if (!sections[name].firstChild) sections[name].append(VIEWS[name][1](view.report));
}

function openView(name, place = null) {
  viewName = name;
  for (const [key, section] of Object.entries(sections)) {
    section.hidden = key !== name;
    const tab = document.getElementById(`tab-${key}`);
    tab.setAttribute('aria-selected', String(key === name));
    tab.tabIndex = key === name ? 0 : -1;
  }
  make(name);
  sections[name].firstChild.shown?.();
  if (name === 'groups' && view.all.length) openGroup(place || (view.group && view.all[view.n]) || firstGroup());
  else remember();
}

/** Where the groups open: at the first of a filtered or sorted table, else at the most telling one. */
function firstGroup() {
  const narrowed = ['with', 'in', 'by', 'q'].some((name) => state[name] !== DEFAULTS[name]);
  return (narrowed && listed()[0]) || mostTelling();
}

function follow() {
  const [name, place] = readAddress();
  if (taskResults()?.task !== view.report.task) drawViews();
  const isFilter = !place && name === 'groups' && location.hash.includes('&');
  if (isFilter) view.group = null; // its first group is opened
  openView(place ? 'groups' : name || 'overview', place);
}

const isDark = () =>
  (document.documentElement.dataset.theme ||
    (window.matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';

function turnTheme() {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  repaint();
}

/** Canvases do not follow style sheets: draw those in sight again. */
function repaint() {
  colours.clear();
  for (const strip of document.querySelectorAll('.strip')) strip.draw();
  drawVisible();
}

function helpBox() {
  const box = h(
    'dialog',
    { id: 'help' },
    h('h2', 'Keys'),
    h('dl', KEYS.map(([key, what]) => [h('dt', key), h('dd', what)])),
    h('p.quiet', 'The address contains the view, the filters and the selected token: copy it to share what you see.'),
    h('button', { onclick: () => box.close() }, 'Close'),
  );
  document.body.append(box);
  return box;
}

function focusSearch() {
  const box = document.getElementById('search');
  box.closest('details').open = true;
  box.focus();
}

function groupKey(event) {
  const change = (changes) => () => {
    set(changes);
    showGroup();
  };
  const signal = available(view.group)[Number(event.key) - 1];
  if (signal) return change({ signal });
  const names = modes().map(([mode]) => mode);
  if (event.key.startsWith('Arrow') && (!view.pinned || event.target.matches('[role=tab]'))) return null;
  return {
    '/': focusSearch,
    j: () => turnGroup(1),
    k: () => turnGroup(-1),
    Escape: () => pin(null),
    p: () => pin({ i: orderOf(view.group)[0] ?? 0, t: 0 }),
    v: change({ mode: names[(names.indexOf(state.mode) + 1) % names.length] }),
    ArrowLeft: () => movePin(-1, 0),
    ArrowRight: () => movePin(1, 0),
    ArrowUp: () => movePin(0, -1),
    ArrowDown: () => movePin(0, 1),
  }[event.key];
}

function listen(help) {
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]')) return;
    if (event.target.matches('input, select, textarea')) {
      if (event.key === 'Escape') event.target.blur();
      return;
    }
    const anywhere = { '?': () => help.showModal(), t: turnTheme }[event.key];
    const act = anywhere || (!sections.groups.hidden && view.group && groupKey(event));
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function tabs() {
  const names = Object.keys(VIEWS);
  const bar = document.getElementById('tabs');
  for (const name of names) {
    const tab = { role: 'tab', id: `tab-${name}`, href: `#${name}`, 'aria-controls': `view-${name}` };
    bar.append(h('a', tab, VIEWS[name][0]));
  }
  bar.addEventListener('keydown', (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const at = names.findIndex((name) => document.activeElement.id === `tab-${name}`);
    const next = document.getElementById(`tab-${names[(at + by + names.length) % names.length]}`);
    next.focus();
    next.click();
  });
}

/** The results of the chosen task, if this is a study of several. */
const taskResults = () => view.whole.tasks?.find(({ task }) => task === state.task) || view.whole.tasks?.[0];

/** Draw from the packed lines; again when a running job has written more. */
async function draw() {
  view.whole = await unpack(lines[0]);
  unpacked.clear();
  drawViews();
}

function drawViews() {
  const main = document.getElementById('content');
  const { whole } = view;
  const chosen = taskResults();
  const runs = chosen ? whole.runs.filter((run) => run.facts.data === chosen.task) : whole.runs;
  const report = { ...whole, ...chosen, runs };
  Object.assign(view, { report, all: allGroups(report), group: null, hits: null });
  for (const frame of main.querySelectorAll('figure')) frame.close?.();
  for (const name of Object.keys(VIEWS)) {
    const hidden = sections[name]?.hidden ?? true;
    sections[name] = h('section', { id: `view-${name}`, role: 'tabpanel', 'aria-labelledby': `tab-${name}`, hidden });
    whenIdle(() => make(name));
  }
  main.replaceChildren(...Object.values(sections));
  window.dew = { report, view, advantages, settingsOf }; // for tests
}

/** `dew view` serves this page: ask whether the runs have changed, and draw what is new in place. */
async function refresh() {
  if (document.activeElement?.matches('input, select') || document.querySelector('dialog[open]')) return; // in use
  try {
    const answer = await fetch('stamp', { cache: 'no-store' });
    const { stamp } = await answer.json();
    if (stamp === live.stamp) return;
    const text = await (await fetch('data', { cache: 'no-store' })).text();
    const [x, y] = [window.scrollX, window.scrollY];
    lines = text.trim().split('\n');
    await draw();
    live.stamp = stamp;
    follow();
    window.scrollTo(x, y);
    live.sign.textContent = `live · ${new Date().toLocaleTimeString()}`;
  } catch {
    live.sign.textContent = 'not connected';
  }
}

/** Which task of a study is shown; nothing for other runs. */
function taskChoice() {
  if (!view.whole.tasks) return null;
  const change = (task) => {
    set({ task, hide: '', chart: '' });
    follow();
    sections[viewName].querySelector('.task select').focus();
  };
  const names = view.whole.tasks.map(({ task }) => [task, visible(task)]);
  return h('div.task', choice('Task', names, view.report.task, change));
}

const live = { stamp: document.documentElement.dataset.live, sign: h('span.quiet.live', 'live') };

async function start() {
  tabs();
  await draw();
  const help = helpBox();
  const empty = ({ target }) => target.open || target.replaceChildren();
  document.body.append(h('dialog.tokens-box', { id: 'tokens', 'aria-label': 'Tokens', onclose: empty }));
  const theme = { id: 'theme', onclick: turnTheme, 'aria-label': 'Light or dark', title: 'Light or dark (t)' };
  const keys = { onclick: () => help.showModal(), 'aria-label': 'Keys', title: 'Keys (?)' };
  const tools = [live.stamp && live.sign, h('button.small', theme, '◐'), h('button.small.keys', keys, '?')];
  refill(document.getElementById('tools'), tools);
  if (live.stamp) setInterval(refresh, 2000);
  listen(help);
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
  window.addEventListener('hashchange', follow);
  follow();
  document.documentElement.dataset.ready = 'yes';
}

start().catch((error) => {
  const old = typeof DecompressionStream === 'undefined';
  const message = old
    ? 'This browser is too old for the page: it needs DecompressionStream, available in every browser since 2023.'
    : `The page is damaged: ${error.message}`;
  document.getElementById('content').replaceChildren(h('p.loading', message));
  throw error;
});
