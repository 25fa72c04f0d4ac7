// What GTPO compares: the same position across answers, one column each.

const COLUMNS = 32; // about as many as fit beside the panel

/** How many answers of one outcome still run at each position, and the mean of what is compared there. */
function sideRow(group, places, correct) {
  return h(
    'tr',
    { class: 'side' },
    h('th', { scope: 'row' }, correct ? '✓ running · mean H' : '✗ running · mean 1/H'),
    places.map((t) => {
      const alive = group.answers.filter((a) => a.correct === correct && t < a.tokens.length && a.live[t]);
      const values = known(alive.map((a) => a.entropy && a.entropy[t])).map(
        (H) => floored(H, null) ** (correct ? 1 : -1),
      );
      return h(
        'td',
        {},
        alive.length
          ? [h('b', {}, String(alive.length)), values.length ? ` · ${number(Number(mean(values).toPrecision(3)))}` : '']
          : '',
      );
    }),
  );
}

const SURE = 0.01;

/** Whether the policy was certain everywhere at this position: weights there compare rounding noise. */
function isSure(group, t) {
  const values = known(group.answers.map((a) => (t < a.tokens.length && a.live[t] && a.entropy ? a.entropy[t] : null)));
  return values.length > 0 && values.every((H) => H < SURE);
}

function columnCell(answer, t, sure) {
  if (t >= answer.tokens.length) return h('td', { class: 'over' });
  const box = h('td', { class: `${tokenClass(answer, t)}${sure ? ' sure' : ''}`, 'data-t': t }, brief(answer.tokens[t]));
  paintToken(box, answer, t, state.signal, view.scale);
  return box;
}

function columnsView(group) {
  const longest = Math.max(0, ...group.answers.map((answer) => answer.tokens.length));
  const from = Math.min(view.column, Math.max(0, longest - 1));
  const to = Math.min(longest, from + COLUMNS);
  const places = Array.from({ length: to - from }, (_, k) => from + k);
  const sures = new Set(places.filter((t) => isSure(group, t)));
  const order = orderOf(group).sort((a, b) => group.answers[b].correct - group.answers[a].correct);
  const turn = (start) => {
    view.column = Math.max(0, start);
    showGroup();
  };
  return h(
    'div',
    { class: 'columns' },
    longest > COLUMNS &&
      h(
        'div',
        { class: 'controls' },
        h('button', { class: 'small', disabled: from === 0, onclick: () => turn(from - COLUMNS) }, '‹ earlier'),
        quiet(`positions ${whole(from + 1)} to ${whole(to)} of ${whole(longest)}`),
        h('button', { class: 'small', disabled: to >= longest, onclick: () => turn(from + COLUMNS) }, 'later ›'),
      ),
    h(
      'div',
      { class: 'scroll-x', tabindex: 0, role: 'region', 'aria-label': 'Answers by position' },
      h(
        'table',
        { class: 'grid' },
        h(
          'thead',
          {},
          h(
            'tr',
            {},
            h('th', {}, 'position'),
            places.map((t) => {
              const sure = sures.has(t);
              const title = sure ? `every entropy at position ${t + 1} is below ${SURE} nats` : null;
              return h('th', { scope: 'col', class: sure ? 'sure' : null, title }, String(t + 1));
            }),
          ),
          sideRow(group, places, true),
          sideRow(group, places, false),
        ),
        h(
          'tbody',
          {},
          order.map((i) =>
            h(
              'tr',
              { 'data-i': i, class: group.answers[i].correct ? 'right' : 'wrong' },
              h('th', { scope: 'row' }, outcome(group.answers[i]), ` #${i + 1}`),
              places.map((t) => columnCell(group.answers[i], t, sures.has(t))),
            ),
          ),
        ),
      ),
    ),
    h(
      'p',
      { class: 'quiet' },
      'A token is compared with the tokens in its column that belong to answers of the same outcome. ',
      `Hatched positions: every entropy is below ${SURE} nats, so the weights there compare rounding noise.`,
    ),
  );
}
