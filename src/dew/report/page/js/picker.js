// The list of groups: narrowed by outcome and by text, walked through by keys.

const isMixed = ({ head }) => head.correct > 0 && head.correct < head.answers;

const listed = () =>
  view.all.filter((g) => {
    const fits = {
      all: true,
      mixed: isMixed(g),
      right: g.head.correct === g.head.answers,
      wrong: g.head.correct === 0,
    }[view.outcomes];
    return fits && (!view.hits || view.hits.has(g.n));
  });

function groupLink(g) {
  return h(
    'a',
    {
      class: 'group-link',
      href: addressOf(g),
      'data-n': g.n,
      '--right': `${(100 * g.head.correct) / Math.max(1, g.head.answers)}%`,
    },
    h(
      'span',
      { class: 'group-head' },
      view.report.runs.length > 1 && runMark(g.r),
      h('span', {}, h('b', {}, `step ${whole(g.head.step)}`), ` · group ${g.head.group}`),
      h('span', { class: 'quiet' }, `${g.head.correct}/${g.head.answers} ✓`),
    ),
    h('span', { class: 'share', 'aria-hidden': 'true' }),
    h('span', { class: 'group-prompt' }, visible(g.head.prompt)),
  );
}

function groupList() {
  const found = listed();
  view.parts.list.replaceChildren(
    ...(found.length ? found.map(groupLink) : [h('p', { class: 'quiet' }, 'No matching groups.')]),
  );
  view.parts.count.textContent =
    found.length === view.all.length
      ? `All groups (${whole(found.length)})`
      : `${whole(found.length)} of ${plural(view.all.length, 'group')}`;
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
  if (wanted) view.parts.count.textContent = 'Searching …';
  for (const { n } of wanted ? view.all : []) {
    const group = await groupAt(n);
    if (view.search !== words) return;
    const texts = [group.prompt, group.gold || '', ...group.answers.map((a) => a.tokens.join(''))];
    if (texts.some((text) => text.toLowerCase().includes(wanted))) hits.add(n);
  }
  view.hits = wanted ? hits : null;
  groupList();
}

function turnGroup(by) {
  const found = listed();
  const at = found.findIndex(({ n }) => n === view.n);
  const next = found[(at + by + found.length) % found.length];
  if (next) location.hash = addressOf(next);
}

function picker(report, wide) {
  const { parts } = view;
  let waiting = 0;
  const box = h('input', {
    type: 'search',
    id: 'search',
    placeholder: 'Search prompts and answers ( / )',
    'aria-label': 'Search prompts and answers',
    oninput: (event) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => search(event.target.value), 200);
    },
  });
  const outcomes = [
    ['all', 'all'],
    ['mixed', 'correct and wrong answers'],
    ['right', 'all correct'],
    ['wrong', 'all wrong'],
  ];
  return h(
    'aside',
    { class: 'picker' },
    h(
      'div',
      { class: 'turn' },
      h('button', { onclick: () => turnGroup(-1), title: 'Previous group (k)' }, '‹ back'),
      h('button', { onclick: () => turnGroup(1), title: 'Next group (j)' }, 'next ›'),
    ),
    h(
      'details',
      { open: wide },
      parts.count,
      box,
      choice('With', outcomes, 'all', (v) => {
        view.outcomes = v;
        groupList();
      }),
      parts.list,
      h(
        'p',
        { class: 'quiet' },
        report.runs.map((run) => `${plural(run.groups.length, 'group')}: ${sampled(run)}.`).join(' '),
      ),
    ),
  );
}
