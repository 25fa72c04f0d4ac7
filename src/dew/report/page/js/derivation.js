// How the credit was made: the formula of one token with its numbers put in.

const bracketed = (x) => (x < 0 ? `(${number(x)})` : number(x));

const step = (name, formula, value, note) =>
  h('li',
    h('span.step-name', name),
    h('span', formula, value !== null && [' = ', h('b', number(value))]),
    note && quiet(note),
  );

const poolStep = ({ mean: m, std }, note) => step('Mean and std', `mean ${number(m)}, std ${number(std)}`, null, note);

const standardStep = (name, reward, pool, note) => {
  const formula = `(${number(reward)} − ${bracketed(pool.mean)}) / (${number(pool.std)} + 0.0001)`;
  return step(name, formula, standardised(reward, pool), note);
};

function signalTable(answer, t, without = []) {
  const names = Object.keys(SIGNALS).filter((name) => isKnown(answer[name]?.[t]) && !without.includes(name));
  return table('signals', null, names.map((name) => [SIGNALS[name].label, number(answer[name][t])]));
}

function poolSteps(entry, settings, things) {
  if (settings.pool === 'outcome') {
    const { reward, pool } = entry.outcome;
    const over = `its reward, relative to the ${plural(pool.count, 'answer')} of the group`;
    const share = `${number(Math.abs(entry.reward))} / ${number(settings.alpha1 + settings.alpha2)}`;
    return [
      standardStep('Advantage of the answer', reward, pool, over),
      step('Advantage', `${number(entry.relative)} · ${share}`, entry.advantage),
    ];
  }
  const count = plural(entry.pool.count, things);
  const over = {
    group: `over all ${count} of the group, those of the other outcome counted as 0`,
    joint: `over all ${count} of the group, with signs`,
    sign: `over the ${count} of the same outcome only`,
  }[settings.pool];
  return [poolStep(entry.pool, over), standardStep('Advantage', entry.reward, entry.pool)];
}

function weightSteps(entry, settings, [one, two, H], peers) {
  if (entry.none) return [step('Reward', 'equal to the mean of the group', null, 'so it gets no credit')];
  if (settings.spread !== 'both' && (settings.spread === 'correct') !== entry.correct)
    return [step('Weight', 'not distributed by entropy on this side', 1)];
  const [sign, x, why] = entry.correct
    ? ['', H, 'correct: the higher the entropy, the larger the reward']
    : ['−', `1/${H}`, 'wrong: the lower the entropy, the larger the penalty'];
  const charge = entry.charge ? [' + charge', ` ${signed(entry.charge)}`] : ['', ''];
  const put = `${sign}(${number(settings.alpha1)} + ${number(settings.alpha2)} · ${number(entry.weight)})${charge[1]}`;
  const average = settings.average === 'geometric' ? 'Geometric mean' : 'Mean';
  const ratio = `${number(entry.x)} / ${number(entry.mean)}`;
  return [
    step('Entropy', H, entry.H, why),
    !entry.correct && step('Its inverse', x, entry.x),
    step(`${average} of ${x}`, `over ${peers}`, entry.mean),
    step('Weight', ratio, entry.weight, '1 = the mean of what it is compared with'),
    step('Shaped reward r̃', `${sign}(${one} + ${two} · weight)${charge[0]} = ${put}`, entry.reward),
  ];
}

const STEPS = {
  GRPO: ({ reward, pool }) => [
    step('Reward of the answer', 'r', reward, 'the same for each of its tokens'),
    poolStep(pool, `over the ${plural(pool.count, 'answer')} of the group`),
    standardStep('Advantage', reward, pool),
  ],
  'GRPO-S': (entry, settings, side) => {
    const peers = `the ${plural(entry.peers, `${side} answer`)} of the group`;
    return [...weightSteps(entry, settings, ['β₁', 'β₂', 'Ĥ'], peers), ...poolSteps(entry, settings, 'answer')];
  },
  GTPO: (entry, settings, side, t) => {
    const peers = {
      column: `the ${plural(entry.peers, `${side} answer`)} still running at position ${t + 1}`,
      row: `the ${plural(entry.peers, 'token')} of this answer`,
      matrix: `the ${plural(entry.peers, 'token')} of all ${side} answers`,
      turn: `the ${plural(entry.peers, 'token')} of this turn in all ${side} answers`,
    }[settings.compare];
    return [...weightSteps(entry, settings, ['α₁', 'α₂', 'H'], peers), ...poolSteps(entry, settings, 'token')];
  },
};

function verdictOn(answer, t, entry) {
  const recorded = answer.advantage?.[t];
  if (!isKnown(recorded)) return h('p.quiet', 'The run recorded no advantage to compare with.');
  if (Math.abs(recorded - entry.advantage) <= 0.01 * Math.max(1, Math.abs(recorded)))
    return h('p.agrees', `✓ The run trained on ${number(recorded)}.`);
  const why = 'it also used data outside this group (the whole batch, a guide), or another rule.';
  return h('p.differs', `The run trained on ${number(recorded)}: ${why}`);
}

/** What happened to the token, in one sentence: how much more or less than under GRPO, and why. */
function inWords(answer, t, entry, where) {
  const verb = isFlipped(answer, t) ? 'Pushed the wrong way' : entry.correct ? 'Credited' : 'Blamed';
  const times = Math.abs(answer.relative?.[t] ?? 1);
  const more = times < 1 ? `${percent(1 - times)} less than` : `${percent(times - 1)} more than`;
  const much = Math.abs(times - 1) < 0.005 ? 'just as' : times >= 2 ? `${short(times)} times as much as` : more;
  const alone = entry.peers === 1 ? `: there is nothing else in ${where} to compare it with` : '';
  if (!isKnown(entry.H) || alone) return h('p.in-words', `${verb} ${much} under GRPO${alone}.`);
  const sure = entry.H < SURE ? 'nearly certain' : entry.H < 0.5 ? 'fairly certain' : 'uncertain';
  const than = entry.weight > 1 === entry.correct ? 'less certain than' : 'more certain than';
  const token = h('code', brief(answer.tokens[t]).slice(0, 40));
  const why = [`the policy was ${sure} of `, token, `, ${than} on average in ${where}.`];
  return h('p.in-words', `${verb} ${much} under GRPO: `, why);
}

/** Advantage of the answer × weight = credit, as bars on one axis. */
function productBars(answer, t) {
  const [of, weight, credit] = [answer.grpo?.[t], answer.relative?.[t], answer.advantage?.[t]];
  if (!of || !isKnown(credit)) return null;
  const reach = Math.max(...[of, weight, credit].map(Math.abs));
  const bar = (name, v) => {
    const look = { 'data-hue': v < 0 ? 'less' : 'plus', '--share': `${(100 * Math.abs(v)) / reach}%` };
    return [name, h('span.bar', look), number(v)];
  };
  return table('product', null, [bar('GRPO', of), bar('× weight', weight * Math.sign(of)), bar('= credit', credit)]);
}

function derivation(group, i, t) {
  const answer = group.answers[i];
  const token = h('code.token-name', brief(answer.tokens[t]).slice(0, 200));
  const place = h('p.place', token, ` token ${t + 1} of answer #${i + 1} `, outcome(answer));
  const head = [h('h3', 'How the credit was computed'), place];
  const sorry = (text) => [head, h('p.quiet', text), signalTable(answer, t)];
  if (!answer.live[t])
    return sorry('This token does not train: the policy did not sample it (tool output, for example).');
  const { method } = group;
  const shown = method || 'GTPO';
  if (shown !== 'GRPO' && !hasEntropy(group))
    return sorry('No entropy was recorded, so the weighting cannot be reproduced.');
  const settings = settingsOf(group);
  const entry = entriesOf(group, shown, settings)[i][t];
  const side = entry.correct ? 'correct' : 'wrong';
  const steps = STEPS[shown](entry, settings, side, t);
  const name = visible(String(group.algorithm || ''));
  const even = shown !== 'GRPO' && settings.pool !== 'outcome' && !hasSignal(group);
  const here = shown === 'GTPO' && settings.compare === 'column' ? ' at this position' : '';
  const where = shown === 'GTPO' && settings.compare === 'row' ? 'this answer' : `the ${side} answers${here}`;
  const noise = shown !== 'GRPO' && isNoise(answer, t);
  return [
    head,
    state.mode === 'methods' && comparedTable(group, answer, t),
    answer.advantage?.[t] && inWords(answer, t, entry, where),
    noise && h('p.differs', 'The entropy here is near zero: treat this weight as noise.'),
    productBars(answer, t),
    signalTable(answer, t, ['relative', 'advantage', 'grpo', 'shaped']),
    h('details',
      remembered('steps'),
      h('summary', method ? `${name.toUpperCase()}, step by step` : 'With GTPO'),
      h('ol.steps', even ? steps.slice(0, -1) : steps),
    ),
    even &&
      h('p', 'All answers of this group have the same outcome: there is nothing to compare, so the advantage is 0.'),
    method
      ? verdictOn(answer, t, entry)
      : h('p.quiet', `This page cannot compute the rule of the run${name && ` (${name})`}.`),
  ];
}
