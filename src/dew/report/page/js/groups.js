// Choose a step and a prompt; read its answers. Owns the address: #step=120&group=3.

const view = {
  report: null,
  all: [], // every group of the page, and the place of the open one
  n: 0,
  group: null, // the open group itself
  mode: 'text', // or columns, methods
  signal: 'advantage',
  scale: null, // its colours over the open group
  stretched: true,
  only: 'all', // which answers, in which order
  sort: 'given',
  column: 0, // first position of the column view
  compared: {}, // answers chosen for the view of the three methods, and its settings if changed
  what: null,
  pinned: null, // the token that was clicked, and the one under the pointer
  hovered: null,
  search: '', // what the list of groups is narrowed to
  hits: null,
  outcomes: 'all',
  parts: {},
};

/** Every group of every run: {run, r, head, n}; n counts over all runs, as the packed lines do. */
function allGroups(report) {
  let n = 0;
  return report.runs.flatMap((run, r) => run.groups.map((head) => ({ run, r, head, n: n++ })));
}

const addressOf = ({ r, head }) =>
  `#step=${head.step}&group=${head.group}${view.report.runs.length > 1 ? `&run=${r + 1}` : ''}`;

/** The group that an address names; where the page lacks that step, one of the nearest step. */
function findAddress(hash) {
  const wish = new URLSearchParams(hash.replace(/^#/, ''));
  if (!wish.has('step')) return null;
  const run = view.all.filter((g) => g.r === Number(wish.get('run') || 1) - 1);
  const away = (g) => Math.abs(g.head.step - Number(wish.get('step')));
  const least = Math.min(...run.map(away));
  const near = run.filter((g) => away(g) === least);
  return near.find((g) => g.head.group === Number(wish.get('group') || 0)) || near[0] || null;
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

/** Mean |r̃| of both sides, beside the α₁ + α₂ that weighting must keep. */
function massLine(group) {
  const method = methodOf(group);
  if (!['GTPO', 'GRPO-S'].includes(method) || !group.answers.some((a) => a.shaped)) return null;
  const { alpha1, alpha2 } = settingsOf(group);
  const total = alpha1 + alpha2;
  const sides = [true, false]
    .map((correct) =>
      group.answers
        .filter((a) => a.correct === correct && a.shaped)
        .flatMap((a) => {
          const live = a.shaped.filter((_, t) => a.live[t]).map((x) => Math.abs(x - (a.extra || 0)));
          return method === 'GTPO' ? live : live.slice(0, 1);
        }),
    )
    .filter((sizes) => sizes.length)
    .map((sizes) => mean(sizes));
  const kept = sides.every((m) => Math.abs(m / total - 1) < 0.005);
  return h(
    'span',
    { title: 'Weighting moves reward between tokens and creates none: the mean of |r̃| stays α₁ + α₂ for each outcome.' },
    'mean |r̃| ',
    h('b', { class: 'mass' }, sides.map((m) => m.toFixed(4)).join(' and ')),
    ` of ${number(total)}: reward mass ${kept ? 'is conserved' : 'is not conserved'}`,
  );
}

function groupHeading(group) {
  const right = group.answers.filter((a) => a.correct).length;
  return h(
    'header',
    { class: 'group-title' },
    h('h2', {}, `Step ${whole(group.step)}, group ${group.group}`),
    h('p', { class: 'prompt' }, visible(group.prompt) || '(the prompt was not recorded)'),
    h(
      'p',
      { class: 'facets' },
      known([
        group.gold !== null ? h('span', {}, 'gold answer ', h('code', {}, brief(group.gold))) : null,
        h('span', {}, h('b', {}, `${right} of ${group.answers.length}`), ' correct'),
        group.algorithm ? h('span', {}, visible(String(group.algorithm))) : null,
        massLine(group),
      ]),
    ),
  );
}

function groupControls(group) {
  const change = (name) => (value) => {
    view[name] = value;
    showGroup();
  };
  const modes = [
    ['text', 'Answers'],
    ['columns', 'Columns'],
    ['methods', 'GRPO · GRPO-S · GTPO'],
  ];
  const segments = (label, key, entries, current, act) =>
    h(
      'div',
      { class: 'segments', role: 'group', 'aria-label': label },
      entries.map(([value, text, note]) =>
        h(
          'button',
          { 'aria-pressed': String(value === current), [key]: value, title: note, onclick: () => act(value) },
          text,
        ),
      ),
    );
  return h(
    'div',
    { class: 'controls', id: 'group-controls' },
    segments('View', 'data-mode', modes, view.mode, change('mode')),
    view.mode !== 'methods' && [
      segments(
        'Colour by',
        'data-signal',
        available(group).map((name) => [name, SIGNALS[name].label, SIGNALS[name].note]),
        view.signal,
        change('signal'),
      ),
      choice(
        'Show',
        [
          ['all', 'all answers'],
          ['correct', 'correct only'],
          ['wrong', 'wrong only'],
        ],
        view.only,
        change('only'),
      ),
      choice(
        'Sort',
        [
          ['given', 'as sampled'],
          ['longest', 'longest first'],
          ['shortest', 'shortest first'],
          ['reward', 'by reward'],
          ['credit', 'by mean |credit|'],
        ],
        view.sort,
        change('sort'),
      ),
      SIGNALS[view.signal].scale === 'signed' &&
        choice(
          'Depth',
          [
            ['yes', 'stretched to the range'],
            ['no', 'from zero'],
          ],
          view.stretched ? 'yes' : 'no',
          (v) => change('stretched')(v === 'yes'),
        ),
    ],
  );
}

function showGroup() {
  const { group, parts } = view;
  if (!group) return;
  const signal = SIGNALS[view.signal];
  view.scale = scaleOf(group, view.signal, view.stretched);
  const body = { text: answersView, columns: columnsView, methods: compareView }[view.mode](group);
  const inside = parts.group.querySelector('.scroll-x')?.scrollLeft || 0;
  parts.group.parentElement?.classList.toggle('compares', view.mode === 'methods');
  parts.group.replaceChildren(
    groupHeading(group),
    groupControls(group),
    view.mode === 'methods' ? '' : legend(view.scale, `${signal.label}: ${signal.note}`),
    body,
  );
  const scroll = parts.group.querySelector('.scroll-x');
  if (scroll) scroll.scrollLeft = inside;
  markPinned();
}

function groups(report) {
  view.report = report;
  view.all = allGroups(report);
  if (!view.all.length)
    return h(
      'div',
      { class: 'page' },
      h('p', { class: 'calm' }, 'This run recorded no answers, so there are no groups.'),
    );
  const wide = window.matchMedia('(min-width: 60rem)').matches;
  const parts = (view.parts = {
    list: h('div', { class: 'group-list' }),
    count: h('summary', {}),
    group: h('div', { class: 'group' }),
    panel: h('aside', { class: 'panel', 'aria-label': 'How the credit was computed' }),
    tip: h('div', { class: 'tip', hidden: true, role: 'tooltip' }),
  });
  const page = h('div', { class: 'groups' }, picker(report, wide), parts.group, parts.panel, parts.tip);
  watchTokens(parts, wide);
  tell(null);
  groupList();
  return page;
}
