// A group's answers one below the other, every token coloured by the chosen signal.

const FIRST_TOKENS = 2000;

const outcome = (answer) =>
  h('span', { class: `outcome ${answer.correct ? 'right' : 'wrong'}` }, answer.correct ? '✓ correct' : '✗ wrong');
const known = (list) => list.filter((v) => v !== null && v !== undefined);

/** Whether the open run recorded answers as whole texts (TRL's own files), each then one token. */
const onlyText = () => view.all[view.n].run.kind === 'trl';

/** The colour scale of one signal over a whole group. */
function scaleOf(group, signal, stretched) {
  const values = group.answers.flatMap((answer) => (answer[signal] || []).filter((_, t) => answer.live[t]));
  return makeScale(SIGNALS[signal].scale, values, stretched);
}

function paintToken(element, answer, t, signal, scale) {
  const value = answer[signal] ? answer[signal][t] : null;
  if (!answer.live[t]) element.dataset.hue = 'dead';
  else if (value === null || value === undefined) element.dataset.hue = 'none';
  else paint(element, scale.of(value));
}

/** The whole answer as a barcode, as long as the answer is beside the longest. */
function strip(answer, longest, signal, scale) {
  const width = Math.max(1, Math.min(answer.tokens.length, 4000));
  const canvas = h('canvas', {
    class: 'strip',
    width,
    height: 1,
    'aria-hidden': 'true',
    '--share': `${(100 * answer.tokens.length) / longest}%`,
  });
  const pen = canvas.getContext('2d');
  const colours = { plus: css('--plus'), less: css('--less'), amount: css('--amount') };
  for (let x = 0; x < width; x++) {
    const t = Math.floor((x * answer.tokens.length) / width);
    const value = answer[signal] && answer.live[t] ? answer[signal][t] : null;
    const [hue, deep] = value === null || value === undefined ? ['none', 0] : scale.of(value);
    if (!colours[hue]) continue;
    pen.globalAlpha = deep / 100;
    pen.fillStyle = colours[hue];
    pen.fillRect(x, 0, 1, 1);
  }
  return canvas;
}

function facets(answer) {
  const facts = [
    `reward ${number(answer.reward)}${answer.extra ? ` ${signed(answer.extra)} charge` : ''}`,
    onlyText() ? null : plural(answer.tokens.length, 'token'),
    answer.extracted !== null && answer.extracted !== undefined
      ? ['answered ', h('code', {}, brief(answer.extracted))]
      : null,
    answer.verdict && !['correct', 'wrong'].includes(answer.verdict)
      ? h('b', {}, `verifier: ${visible(answer.verdict)}`)
      : null,
    answer.truncated ? h('b', {}, 'truncated') : null,
    answer.guided ? h('b', {}, 'from the guide') : null,
  ];
  return h(
    'span',
    { class: 'facets' },
    known(facts).map((fact) => h('span', {}, fact)),
  );
}

function tokenSpans(answer, from, to, signal, scale) {
  const spans = [];
  for (let t = from; t < Math.min(to, answer.tokens.length); t++) {
    const span = h('span', { class: 't', 'data-t': t }, running(answer.tokens[t]) || '∅');
    paintToken(span, answer, t, signal, scale);
    spans.push(span);
  }
  return spans;
}

function answerCard(answer, i, longest) {
  const body = h('div', { class: 'tokens' }, tokenSpans(answer, 0, FIRST_TOKENS, view.signal, view.scale));
  let shown = FIRST_TOKENS;
  const more = () => {
    const left = answer.tokens.length - shown;
    return (
      left > 0 &&
      h(
        'button',
        {
          class: 'small more-tokens',
          onclick: (event) => {
            body.append(...tokenSpans(answer, shown, shown + FIRST_TOKENS, view.signal, view.scale));
            shown += FIRST_TOKENS;
            event.target.replaceWith(more() || '');
          },
        },
        `Show ${whole(Math.min(left, FIRST_TOKENS))} more of ${whole(left)} hidden tokens`,
      )
    );
  };
  return h(
    'article',
    { class: `answer ${answer.correct ? 'right' : 'wrong'}`, 'data-i': i },
    h('header', {}, outcome(answer), h('span', { class: 'quiet' }, `#${i + 1}`), facets(answer)),
    strip(answer, longest, view.signal, view.scale),
    body,
    more(),
  );
}

/** The answers' places in the order and selection that the controls ask for. */
function orderOf(group) {
  const size = (i) => mean(known(group.answers[i].advantage || []).map(Math.abs));
  const by = {
    given: () => 0,
    longest: (a, b) => group.answers[b].tokens.length - group.answers[a].tokens.length,
    shortest: (a, b) => group.answers[a].tokens.length - group.answers[b].tokens.length,
    reward: (a, b) => group.answers[b].reward - group.answers[a].reward,
    credit: (a, b) => size(b) - size(a),
  }[view.sort];
  return group.answers
    .map((_, i) => i)
    .filter((i) => view.only === 'all' || group.answers[i].correct === (view.only === 'correct'))
    .sort(by);
}

function answersView(group) {
  const longest = Math.max(1, ...group.answers.map((answer) => answer.tokens.length));
  const order = orderOf(group);
  if (!order.length) return h('p', { class: 'calm' }, 'This group has no answers with the selected outcome.');
  return h(
    'div',
    { class: 'answers' },
    order.map((i) => answerCard(group.answers[i], i, longest)),
  );
}
