// The tokens behind a bar, a cell or a word: a list with links to their groups.

const MOST_TOKENS = 100;

/** Every trained token of a run's groups that passes the test: {place, group, i, t}. */
async function collect(r, test) {
  const found = [];
  for (const place of view.all.filter((g) => g.r === r)) {
    const group = await groupAt(place.n);
    group.answers.forEach((answer, i) => {
      for (let t = 0; t < answer.tokens.length; t++)
        if (answer.live[t] && test(answer, t, group, i)) found.push({ place, group, i, t });
    });
  }
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

/** Open the list. With `tenth`, the tokens are those of one tenth of all found, by increasing entropy. */
async function openTokens(title, r, test, tenth = null) {
  const box = document.getElementById('tokens');
  const close = h('button', { class: 'small close', onclick: () => box.close(), 'aria-label': 'Close' }, '✕');
  box.replaceChildren(close, h('h2', {}, title), h('p', { class: 'quiet' }, 'Searching …'));
  box.showModal();
  let found = await collect(r, test);
  if (tenth !== null) {
    const H = ({ group, i, t }) => group.answers[i].entropy[t];
    found.sort((a, b) => H(a) - H(b));
    const [size, extra] = [Math.floor(found.length / 10), found.length % 10]; // as numpy.array_split
    const from = tenth * size + Math.min(tenth, extra);
    found = found.slice(from, from + size + (tenth < extra ? 1 : 0));
  }
  const shown = found.slice(0, MOST_TOKENS);
  const csv = () => [
    ['step', 'group', 'answer', 'position', 'correct', 'token', 'entropy', 'advantage'],
    ...found.map(({ group, i, t }) => {
      const { correct, tokens, entropy, advantage } = group.answers[i];
      return [group.step, group.group, i + 1, t + 1, correct, tokens[t], entropy?.[t], advantage?.[t]];
    }),
  ];
  box.replaceChildren(
    close,
    h('h2', {}, title),
    h(
      'p',
      { class: 'quiet' },
      `${plural(found.length, 'token')}${shown.length < found.length ? `, the first ${shown.length} are shown` : ''} `,
      saveButtons('tokens', csv),
    ),
    h(
      'div',
      { class: 'scroll-x', tabindex: 0, role: 'region', 'aria-label': 'Tokens' },
      h(
        'table',
        { class: 'token-table' },
        h('thead', {}, h('tr', {}, ['group', 'outcome', 'token', 'entropy', 'credit'].map((name) => h('th', { scope: 'col' }, name)))),
        h('tbody', { onclick: (event) => event.target.closest('a') && box.close() }, shown.map(tokenRow)),
      ),
    ),
  );
}

/** Attributes of a mark in a chart that opens its tokens by click or key. */
const opens = (label, act) => ({
  role: 'button',
  tabindex: -1,
  class: 'opens',
  'aria-label': label,
  onclick: act,
  onkeydown: (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === 'Enter' || event.key === ' ') act();
    else if (step) {
      const all = [...event.target.closest('svg').querySelectorAll('.opens')];
      const next = all[(all.indexOf(event.target) + step + all.length) % all.length];
      event.target.setAttribute('tabindex', -1);
      next.setAttribute('tabindex', 0);
      next.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  },
});

/** One tab stop per chart; the arrow keys move between its marks. */
function oneStop(svg) {
  svg.querySelector('.opens')?.setAttribute('tabindex', 0);
  return svg;
}
