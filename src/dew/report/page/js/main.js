// The page: unpack, draw the four views, follow the address, listen to the keyboard.

const VIEWS = {
  overview: ['Overview', overview],
  curves: ['Curves', curves],
  groups: ['Groups', groups],
  credit: ['Credit', spreadView],
};
const KEYS = [
  ['j  k', 'next and previous group'],
  ['1 … 6', 'colour by advantage, shaped reward, entropy, …'],
  ['v', 'answers, columns, methods'],
  ['p', 'select the first token (or click any)'],
  ['← → ↑ ↓', 'move the selection'],
  ['Esc', 'clear the selection'],
  ['/', 'search'],
  ['t', 'light or dark theme'],
  ['?', 'this help'],
];
const sections = {};

function openView(name, place = null) {
  for (const [key, section] of Object.entries(sections)) {
    section.hidden = key !== name;
    const tab = document.getElementById(`tab-${key}`);
    tab.setAttribute('aria-selected', String(key === name));
    tab.tabIndex = key === name ? 0 : -1;
  }
  sections[name].firstChild.shown?.();
  if (name !== 'groups' || !view.all.length) return;
  if (place || !view.group) openGroup(place || view.all.find(isMixed) || view.all[0]);
  else markCurrent();
}

function follow() {
  const place = findAddress(location.hash);
  if (place) openView('groups', place);
  else openView(Object.keys(VIEWS).find((name) => location.hash === `#${name}`) || 'overview');
}

const isDark = () =>
  (document.documentElement.dataset.theme ||
    (window.matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';

function turnTheme() {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  repaint();
}

/** Canvases do not follow style sheets: draw what is visible again. */
function repaint() {
  for (const section of Object.values(sections)) if (!section.hidden) section.firstChild.shown?.();
  showGroup();
}

function helpBox() {
  const box = h(
    'dialog',
    { id: 'help' },
    h('h2', {}, 'Keys'),
    h(
      'dl',
      {},
      KEYS.flatMap(([key, what]) => [h('dt', {}, key), h('dd', {}, what)]),
    ),
    h('p', { class: 'quiet' }, 'The address contains the step and the group: copy it to share this view.'),
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
  const modes = ['text', 'columns', 'methods'];
  const signal = /^[1-9]$/.test(event.key) && available(view.group)[Number(event.key) - 1];
  if (signal)
    return () => {
      view.signal = signal;
      showGroup();
    };
  if (event.key.startsWith('Arrow') && (!view.pinned || event.target.matches('[role=tab]'))) return null;
  return {
    '/': focusSearch,
    j: () => turnGroup(1),
    k: () => turnGroup(-1),
    Escape: () => pin(null),
    p: () => pin({ i: orderOf(view.group)[0] ?? 0, t: 0 }),
    v: () => {
      view.mode = modes[(modes.indexOf(view.mode) + 1) % modes.length];
      showGroup();
    },
    ArrowLeft: () => movePin(-1, 0),
    ArrowRight: () => movePin(1, 0),
    ArrowUp: () => movePin(0, -1),
    ArrowDown: () => movePin(0, 1),
  }[event.key];
}

function listen(help) {
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
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
  bar.append(
    ...names.map((name) =>
      h('a', { role: 'tab', id: `tab-${name}`, href: `#${name}`, 'aria-controls': `view-${name}` }, VIEWS[name][0]),
    ),
  );
  bar.addEventListener('keydown', (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const at = names.findIndex((name) => document.activeElement.id === `tab-${name}`);
    const next = document.getElementById(`tab-${names[(at + by + names.length) % names.length]}`);
    next.focus();
    next.click();
  });
}

async function start() {
  const main = document.getElementById('content');
  const report = await unpack(lines[0]);
  main.replaceChildren();
  tabs();
  for (const [name, [, draw]] of Object.entries(VIEWS)) {
    sections[name] = h(
      'section',
      { id: `view-${name}`, role: 'tabpanel', 'aria-labelledby': `tab-${name}` },
      draw(report),
    );
    main.append(sections[name]);
  }
  const help = helpBox();
  document
    .getElementById('tools')
    .append(
      h(
        'button',
        { class: 'small', id: 'theme', onclick: turnTheme, 'aria-label': 'Light or dark', title: 'Light or dark (t)' },
        '◐',
      ),
      h(
        'button',
        { class: 'small keys', onclick: () => help.showModal(), 'aria-label': 'Keys', title: 'Keys (?)' },
        '?',
      ),
    );
  listen(help);
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
  window.addEventListener('hashchange', follow);
  follow();
  window.dew = { report, view, groupAt, gtpo, grpoS, grpo, advantages, settingsOf };
  document.documentElement.dataset.ready = 'yes';
}

start().catch((error) => {
  const old = typeof DecompressionStream === 'undefined';
  const message = old
    ? 'This browser is too old for the page: it needs DecompressionStream, available in every browser since 2023.'
    : `The page is damaged: ${error.message}`;
  document.getElementById('content').replaceChildren(h('p', { class: 'loading' }, message));
  throw error;
});
