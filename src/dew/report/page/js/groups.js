// Choose a step and a prompt; read its answers. Owns the address: #step=120&group=3.

const view = {
  report: null, all: [], n: 0, group: null, signal: 'advantage', scale: null, stretched: true, only: 'all', sort: 'given',
  mode: 'text', column: 0, compared: {}, what: null, pinned: null, told: null, search: '', outcomes: 'all', hits: null, parts: {},
};

/** Every group of every run: {run, r, head, n}; n counts over all runs, as the packed lines do. */
function allGroups(report) {
  let n = 0;
  return report.runs.flatMap((run, r) => run.groups.map((head) => ({ run, r, head, n: n++ })));
}

const addressOf = ({ r, head }) => `#step=${head.step}&group=${head.group}${view.report.runs.length > 1 ? `&run=${r + 1}` : ''}`;

function findAddress(hash) {
  const wish = new URLSearchParams(hash.replace(/^#/, ''));
  if (!wish.has('step')) return null;
  const run = Number(wish.get('run') || 1) - 1;
  const same = view.all.filter((g) => g.r === run && g.head.step === Number(wish.get('step')));
  return same.find((g) => g.head.group === Number(wish.get('group') || 0)) || same[0] || null;
}

const isMixed = ({ head }) => head.correct > 0 && head.correct < head.answers;

const listed = () => view.all.filter((g) => {
  const fits = { all: true, mixed: isMixed(g), right: g.head.correct === g.head.answers, wrong: g.head.correct === 0 }[view.outcomes];
  return fits && (!view.hits || view.hits.has(g.n));
});

function groupLink(g) {
  return h('a', { class: 'group-link', href: addressOf(g), 'data-n': g.n, '--right': `${(100 * g.head.correct) / Math.max(1, g.head.answers)}%` },
    h('span', { class: 'group-head' }, view.report.runs.length > 1 && runMark(g.r), h('span', {}, h('b', {}, `step ${whole(g.head.step)}`), ` · group ${g.head.group}`),
      h('span', { class: 'quiet' }, `${g.head.correct}/${g.head.answers} ✓`)),
    h('span', { class: 'share', 'aria-hidden': 'true' }), h('span', { class: 'group-prompt' }, visible(g.head.prompt)));
}

function groupList() {
  const found = listed();
  view.parts.list.replaceChildren(...(found.length ? found.map(groupLink) : [h('p', { class: 'quiet' }, 'No group fits.')]));
  view.parts.count.textContent = found.length === view.all.length ? `All groups (${whole(found.length)})` : `${whole(found.length)} of ${plural(view.all.length, 'group')}`;
  markCurrent();
}

function markCurrent() {
  const { list } = view.parts;
  list.querySelector('[aria-current]')?.removeAttribute('aria-current');
  const current = list.querySelector(`[data-n="${view.n}"]`);
  if (!current) return;
  current.setAttribute('aria-current', 'true');
  list.scrollTop = current.offsetTop - list.clientHeight / 2;
}

/** Text search through prompts and answers: unpacks group after group and keeps those that hold the words. */
async function search(words) {
  view.search = words;
  const wanted = words.trim().toLowerCase();
  const hits = new Set();
  for (const { n } of wanted ? view.all : []) {
    const group = await groupAt(n);
    if (view.search !== words) return;
    const texts = [group.prompt, group.gold || '', ...group.answers.map((a) => a.tokens.join(''))];
    if (texts.some((text) => text.toLowerCase().includes(wanted))) hits.add(n);
  }
  view.hits = wanted ? hits : null;
  groupList();
}

const available = (group) => Object.keys(SIGNALS).filter((name) => group.answers.some((answer) => answer[name]));

async function openGroup(place) {
  const other = view.n !== place.n || !view.group;
  view.n = place.n;
  const group = await groupAt(place.n);
  if (view.n !== place.n) return;
  view.group = group;
  if (other) {
    Object.assign(view, { column: 0, compared: {}, what: null });
    pin(null);
  }
  if (!available(group).includes(view.signal)) view.signal = available(group)[0] || 'advantage';
  showGroup();
  markCurrent();
}

function turnGroup(by) {
  const found = listed();
  const at = found.findIndex(({ n }) => n === view.n);
  const next = found[(at + by + found.length) % found.length];
  if (next) location.hash = addressOf(next);
}

/** Mean |r̃| of both sides, beside the α₁ + α₂ that weighting must keep. */
function massLine(group) {
  const method = methodOf(group);
  if (!['GTPO', 'GRPO-S'].includes(method) || !group.answers.some((a) => a.shaped)) return null;
  const { alpha1, alpha2 } = settingsOf(group);
  const total = alpha1 + alpha2;
  const sides = [true, false].map((correct) => group.answers.filter((a) => a.correct === correct && a.shaped).flatMap((a) => {
    const live = a.shaped.filter((_, t) => a.live[t]).map((x) => Math.abs(x - (a.extra || 0)));
    return method === 'GTPO' ? live : live.slice(0, 1);
  })).filter((sizes) => sizes.length).map((sizes) => mean(sizes));
  const kept = sides.every((m) => Math.abs(m / total - 1) < 0.005);
  return h('span', { title: 'Weighting moves reward from token to token and makes none: the mean of |r̃| stays α₁ + α₂ on each side.' },
    'mean |r̃| ', h('b', { class: 'mass' }, sides.map((m) => m.toFixed(4)).join(' and ')), ` of ${number(total)}: reward mass ${kept ? 'is conserved' : 'is not conserved'}`);
}

function groupHeading(group) {
  const right = group.answers.filter((a) => a.correct).length;
  return h('header', { class: 'group-title' },
    h('h2', {}, `Step ${whole(group.step)}, group ${group.group}`),
    h('p', { class: 'prompt' }, visible(group.prompt) || '(the prompt was not recorded)'),
    h('p', { class: 'facets' }, known([
      group.gold !== null ? h('span', {}, 'gold answer ', h('code', {}, brief(group.gold))) : null,
      h('span', {}, h('b', {}, `${right} of ${group.answers.length}`), ' correct'),
      group.algorithm ? h('span', {}, visible(String(group.algorithm))) : null,
      massLine(group)])));
}

function groupControls(group) {
  const change = (name) => (value) => { view[name] = value; showGroup(); };
  const modes = [['text', 'Answers'], ['columns', 'Columns'], ['methods', 'GRPO · GRPO-S · GTPO']];
  const segments = (label, key, entries, current, act) => h('div', { class: 'segments', role: 'group', 'aria-label': label },
    entries.map(([value, text, note]) => h('button', { 'aria-pressed': String(value === current), [key]: value, title: note, onclick: () => act(value) }, text)));
  return h('div', { class: 'controls', id: 'group-controls' },
    segments('View', 'data-mode', modes, view.mode, change('mode')),
    view.mode !== 'methods' && [
      segments('Colour by', 'data-signal', available(group).map((name) => [name, SIGNALS[name].label, SIGNALS[name].note]), view.signal, change('signal')),
      choice('Show', [['all', 'all answers'], ['correct', 'correct only'], ['wrong', 'wrong only']], view.only, change('only')),
      choice('Sort', [['given', 'as sampled'], ['longest', 'longest first'], ['shortest', 'shortest first'], ['reward', 'by reward'], ['credit', 'by mean |credit|']], view.sort, change('sort')),
      SIGNALS[view.signal].scale === 'signed' && choice('Depth', [['yes', 'stretched to the range'], ['no', 'from zero']], view.stretched ? 'yes' : 'no', (v) => change('stretched')(v === 'yes'))]);
}

function showGroup() {
  const { group, parts } = view;
  if (!group) return;
  const signal = SIGNALS[view.signal];
  view.scale = scaleOf(group, view.signal, view.stretched);
  const body = { text: answersView, columns: columnsView, methods: compareView }[view.mode](group);
  const inside = parts.group.querySelector('.scroll-x')?.scrollLeft || 0;
  parts.group.replaceChildren(groupHeading(group), groupControls(group),
    view.mode === 'methods' ? '' : legend(view.scale, `${signal.label}: ${signal.note}`), body);
  const scroll = parts.group.querySelector('.scroll-x');
  if (scroll) scroll.scrollLeft = inside;
  markPinned();
}

function picker(report, wide) {
  const { parts } = view;
  let waiting = 0;
  const box = h('input', { type: 'search', id: 'search', placeholder: 'Search prompts and answers ( / )', 'aria-label': 'Search prompts and answers',
    oninput: (event) => { clearTimeout(waiting); waiting = setTimeout(() => search(event.target.value), 200); } });
  const outcomes = [['all', 'all'], ['mixed', 'right and wrong answers'], ['right', 'all right'], ['wrong', 'all wrong']];
  return h('aside', { class: 'picker' },
    h('div', { class: 'turn' }, h('button', { onclick: () => turnGroup(-1), title: 'Previous group (k)' }, '‹ previous'), h('button', { onclick: () => turnGroup(1), title: 'Next group (j)' }, 'next ›')),
    h('details', { open: wide }, parts.count, box, choice('With', outcomes, 'all', (v) => { view.outcomes = v; groupList(); }), parts.list,
      h('p', { class: 'quiet' }, report.runs.map((run) => `${plural(run.groups.length, 'group')}: ${sampled(run)}.`).join(' '))));
}

function groups(report) {
  view.report = report;
  view.all = allGroups(report);
  if (!view.all.length) return h('div', { class: 'page' }, h('p', { class: 'calm' }, 'This run recorded no answers, so there are no groups to look at.'));
  const wide = window.matchMedia('(min-width: 60rem)').matches;
  const parts = view.parts = {
    list: h('div', { class: 'group-list' }), count: h('summary', {}), group: h('div', { class: 'group' }),
    panel: h('aside', { class: 'panel', 'aria-label': 'How the credit was made' }), tip: h('div', { class: 'tip', hidden: true, role: 'tooltip' }),
  };
  const page = h('div', { class: 'groups' }, picker(report, wide), parts.group, parts.panel, parts.tip);
  watchTokens(parts, wide);
  tell(null);
  groupList();
  return page;
}
