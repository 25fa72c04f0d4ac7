// The page: unpack, draw the four views, follow the address, listen to the keyboard.

const VIEWS = { overview, curves, groups, credit: spreadView };
const sectionOf = (name) => byId(`view-${name}`);

/** Views are made when they are opened, or before that while the page is idle. */
function make(name) {
  if (!sectionOf(name).firstChild) sectionOf(name).append(VIEWS[name](view.report));
}

function openView(name, place = null) {
  viewName = name;
  for (const key of Object.keys(VIEWS)) {
    sectionOf(key).hidden = key !== name;
    byId(`tab-${key}`).setAttribute('aria-selected', String(key === name));
    byId(`tab-${key}`).tabIndex = key === name ? 0 : -1;
  }
  make(name);
  sectionOf(name).firstChild.shown?.();
  if (name === 'groups' && view.all.length) openGroup(place || (view.group && view.place) || firstGroup());
  else remember();
}

/** Where the groups open: at the first of a filtered or sorted table, else at the most telling one. */
const firstGroup = () => (tableLook() !== tableLook(DEFAULTS) && listed()[0]) || mostTelling();

function follow() {
  const [name, place] = readAddress();
  if (taskResults()?.task !== view.report.task) drawViews();
  const isFilter = !place && name === 'groups' && location.hash.includes('&');
  if (isFilter) view.group = null; // its first group is opened
  openView(place ? 'groups' : name || 'overview', place);
  if (state.find && !byId('tokens').open) openTokens(state.find);
}

const dark = window.matchMedia('(prefers-color-scheme: dark)');
const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? 'dark' : 'light')) === 'dark';

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

function groupKey(event) {
  const change = (name, value) => () => setting(name, showGroup)(value);
  const signal = available(view.group)[Number(event.key) - 1];
  if (signal) return change('signal', signal);
  const names = modes();
  const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (by) return view.pinned && !event.target.matches('[role=tab]') && (() => movePin(...by));
  return {
    '/': () => {
      byId('search').closest('details').open = true;
      byId('search').focus();
    },
    j: () => turnGroup(1),
    k: () => turnGroup(-1),
    Escape: () => pin(null),
    p: () => pin({ i: orderOf(view.group)[0] ?? 0, t: 0 }),
    f: nextFlip,
    v: change('mode', names[(names.indexOf(state.mode) + 1) % names.length]),
  }[event.key];
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]')) return;
  if (event.target.matches('input, select, textarea')) {
    if (event.key === 'Escape') event.target.blur();
    return;
  }
  const anywhere = { '?': () => byId('help').showModal(), t: turnTheme, q: view.all[0] && (() => openTokens('')) }[event.key];
  const act = anywhere || (viewName === 'groups' && view.group && groupKey(event));
  if (!act) return;
  event.preventDefault();
  act();
}

/** The arrow keys move between the tabs. */
function turnTab(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const tabs = [...byId('tabs').children].filter((tab) => !tab.hidden);
  const next = tabs.at((tabs.indexOf(document.activeElement) + by) % tabs.length);
  next.focus();
  next.click();
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
  const { whole } = view;
  const chosen = taskResults();
  const runs = chosen ? whole.runs.filter((run) => run.facts.data === chosen.task) : whole.runs;
  const report = { ...whole, ...chosen, runs };
  Object.assign(view, { report, all: allGroups(runs), place: null, group: null, drawn: '', hits: null });
  for (const frame of document.querySelectorAll('main figure')) frame.close?.();
  byId('tab-curves').hidden = !runs.some((run) => run.metrics.step);
  byId('tab-groups').hidden = byId('tab-credit').hidden = !view.all.length;
  nameTab(report);
  for (const name of Object.keys(VIEWS)) {
    sectionOf(name).replaceChildren();
    idle().then(() => make(name));
  }
  window.dew = { report, view, advantages, makeScale }; // for tests
}

let shownStamp = document.documentElement.dataset.live; // of the runs, if `dew view` serves this page

/** `dew view` serves this page: ask whether the runs have changed, and draw what is new in place. */
async function refresh() {
  if (document.activeElement?.matches('input, select') || document.querySelector('dialog[open]')) return; // in use
  try {
    const answer = await fetch('stamp', { cache: 'no-store' });
    const { stamp } = await answer.json();
    if (stamp === shownStamp) return;
    const text = await (await fetch('data', { cache: 'no-store' })).text();
    const [x, y] = [window.scrollX, window.scrollY];
    lines = text.trim().split('\n');
    await draw();
    shownStamp = stamp;
    follow();
    window.scrollTo(x, y);
    byId('live').textContent = `live · ${new Date().toLocaleTimeString()}`;
  } catch {
    byId('live').textContent = 'not connected';
  }
}

/** Which task of a study is shown; nothing for other runs. */
function taskChoice() {
  if (!view.whole.tasks) return null;
  const change = (task) => {
    set({ task, hide: '', chart: '' });
    follow();
    sectionOf(viewName).querySelector('.task select').focus();
  };
  const names = view.whole.tasks.map(({ task }) => [task, visible(task)]);
  return h('div.task', choice('Task', names, view.report.task, change));
}

async function start() {
  await draw();
  byId('loading').remove();
  byId('theme').onclick = turnTheme;
  byId('keys').onclick = () => byId('help').showModal();
  byId('close-help').onclick = () => byId('help').close();
  byId('tokens').onclose = ({ target }) => {
    if (!target.open) target.replaceChildren();
    if (history.state?.dialog) history.back();
    else if (state.find) set({ find: '' });
  };
  window.addEventListener('popstate', () => byId('tokens').close());
  byId('tabs').onkeydown = turnTab;
  document.onkeydown = pressed;
  if (shownStamp) setInterval(refresh, 2000);
  dark.addEventListener('change', repaint);
  window.addEventListener('hashchange', follow);
  follow();
  document.documentElement.dataset.ready = 'yes';
}

start().catch((error) => {
  const message = `The page is damaged, or this browser is older than 2023: ${error.message}`;
  byId('content').replaceChildren(h('p.loading', message));
  throw error;
});
