// GRPO, GRPO-S and GTPO for one group, with every number on the way kept for the derivation.
//
//   x = H on O⁺, 1/H on O⁻      weight = x / mean(x over its comparison set)
//   r̃ = ±(α1 + α2 · weight) + charge      A = (r̃ − mean) / (std + 1e-4)
//
// With pool 'outcome', A = GRPO's advantage of the answer · |r̃| / (α1 + α2), and its sign replaces the outcome.
//
// The same as dew.credit computes; tests hold the two together.

const FLOOR = 1e-6;
const TURN_CLIP = [0.01, 100];
const STD_EPS = 1e-4;
const PAPER = {
  alpha1: 1, alpha2: 0.1, compare: 'column', average: 'arithmetic', pool: 'group', spread: 'both', entropy_clip: null,
};

const sum = (xs) => xs.reduce((a, b) => a + b, 0);

function mean(xs, average = 'arithmetic') {
  if (!xs.length) return 0;
  return average === 'geometric' ? Math.exp(sum(xs.map(Math.log)) / xs.length) : sum(xs) / xs.length;
}

function spread(xs) {
  const centre = mean(xs);
  return Math.sqrt(sum(xs.map((x) => (x - centre) ** 2)) / Math.max(1, xs.length - 1));
}

function floored(entropy, clip) {
  const H = Math.max(entropy, FLOOR);
  return clip ? Math.min(Math.max(H, clip[0], FLOOR), Math.max(clip[1], FLOOR)) : H;
}

const hasSignal = (group) => new Set(group.answers.map((a) => a.correct)).size > 1;
const hasEntropy = (group) =>
  group.answers.every((a) => a.entropy && a.entropy.every((x, t) => x !== null || !a.live[t]));

const poolOf = (rewards) => ({ mean: mean(rewards), std: spread(rewards), count: rewards.length });
const standardised = (reward, pool) => (reward - pool.mean) / (pool.std + STD_EPS);

/** Mean and std of one side's rewards: over everything with the other side as 0, jointly, or over the side alone. */
function sidePool(entries, correct, kind) {
  const own = (entry) => entry.correct === correct;
  if (kind === 'joint') return poolOf(entries.map((entry) => entry.reward));
  if (kind === 'sign') return poolOf(entries.filter(own).map((entry) => entry.reward));
  return poolOf(entries.map((entry) => (own(entry) ? entry.reward : 0)));
}

/** Weigh entries {correct, x, set, charge} and standardise them; entries with one `set` are compared. */
function weigh(all, group, { alpha1, alpha2, average, pool, spread: sides }) {
  const entries = all.filter((entry) => entry && !entry.none);
  const sets = new Map();
  for (const entry of entries) {
    if (!sets.has(entry.set)) sets.set(entry.set, []);
    sets.get(entry.set).push(entry.x);
  }
  const means = new Map([...sets].map(([key, xs]) => [key, mean(xs, average)]));
  for (const entry of entries) {
    entry.peers = sets.get(entry.set).length;
    entry.mean = means.get(entry.set);
    const spreads = sides === 'both' || (sides === 'correct') === entry.correct;
    entry.weight = spreads ? entry.x / entry.mean : 1;
    entry.reward = (entry.correct ? 1 : -1) * (alpha1 + alpha2 * entry.weight) + entry.charge;
  }
  if (pool === 'outcome') {
    for (const entry of entries) entry.advantage = (entry.relative * Math.abs(entry.reward)) / (alpha1 + alpha2);
    return;
  }
  const [right, wrong] = [true, false].map((correct) => sidePool(entries, correct, pool));
  const signal = hasSignal(group);
  for (const entry of entries) {
    entry.pool = entry.correct ? right : wrong;
    entry.advantage = signal ? standardised(entry.reward, entry.pool) : 0;
  }
}

/** One entry per answer. */
function grpo(group) {
  const rewards = group.answers.map((answer) => answer.reward + (answer.extra || 0));
  const pool = poolOf(rewards);
  return rewards.map((reward) => ({ reward, pool, advantage: standardised(reward, pool) }));
}

/** Each answer's side, GRPO advantage and charge. With pool 'outcome', answers at the group's mean have no side. */
function sidesOf(group, settings) {
  const relative = grpo(group);
  const size = Math.max(...relative.map(({ reward }) => Math.abs(reward)));
  return group.answers.map((answer, i) => {
    if (settings.pool !== 'outcome') return { correct: answer.correct, charge: answer.extra || 0 };
    const { reward, pool, advantage } = relative[i];
    const none = Math.abs(reward - pool.mean) <= 1e-5 * size;
    return { correct: advantage > 0, relative: none ? 0 : advantage, outcome: relative[i], charge: 0, none };
  });
}

const entryOf = (side, H, place) =>
  side.none
    ? { ...side, H, weight: 0, reward: 0, advantage: 0 }
    : { ...side, H, x: side.correct ? H : 1 / H, set: `${side.correct}${place}` };

/** One entry per live token: entries[i][t], undefined where a token does not train. */
function gtpo(group, settings) {
  const sides = sidesOf(group, settings);
  const clip = settings.entropy_clip ?? (settings.compare === 'turn' ? TURN_CLIP : null);
  const entries = group.answers.map((answer, i) => {
    let turn = 0;
    return answer.live.map((alive, t) => {
      if (!alive) return undefined;
      if (!answer.live[t - 1]) turn += 1;
      const H = floored(answer.entropy[t], clip);
      return entryOf(sides[i], H, { column: t, row: i, matrix: 0, turn }[settings.compare]);
    });
  });
  weigh(entries.flat(), group, settings);
  return entries;
}

/** One entry per answer, undefined where no token of it trains: GTPO on answers of one token. */
function grpoS(group, settings) {
  const answers = group.answers.map((answer) => {
    const live = answer.entropy.filter((_, t) => answer.live[t]).map((H) => floored(H, settings.entropy_clip));
    return { ...answer, live: [live.length > 0], entropy: [mean(live, settings.average)] };
  });
  return gtpo({ answers }, { ...settings, compare: 'matrix' }).map(([entry]) => entry);
}

let entries = {}; // the last ones: every token that is pointed at needs those of its group

/** What each token's credit is made of under GRPO, GRPO-S or GTPO; undefined where a token does not train. */
function entriesOf(group, method, settings) {
  const key = JSON.stringify([method, settings]);
  if (entries.group === group && entries.key === key) return entries.rows;
  const each = method === 'GRPO' ? grpo(group) : method === 'GRPO-S' && grpoS(group, settings);
  const row = ({ live }, i) => live.map((alive) => (alive ? each[i] : undefined));
  entries = { group, key, rows: each ? group.answers.map(row) : gtpo(group, settings) };
  return entries.rows;
}

const advantages = (group, method, settings) =>
  entriesOf(group, method, settings).map((row) => row.map((entry) => entry?.advantage ?? null));

/** The settings of a group or a rule in the names used here: GRPO-S calls its weights β. */
function settingsOf({ settings: given = {}, method }) {
  const own = method ? given : { ...given, compare: 'column' };
  const settings = Object.fromEntries(Object.entries(PAPER).map(([name, value]) => [name, own[name] ?? value]));
  return { ...settings, alpha1: own.beta1 ?? settings.alpha1, alpha2: own.beta2 ?? settings.alpha2 };
}
