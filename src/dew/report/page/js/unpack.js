// The page carries its data as lines of gzip in base64: first everything but the answers, then one line per group.

let lines = byId('data').textContent.trim().split('\n');

async function unpack(line) {
  const packed = atob(line);
  const bytes = new Uint8Array(packed.length);
  for (let k = 0; k < bytes.length; k++) bytes[k] = packed.charCodeAt(k); // several times faster than Uint8Array.from
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return JSON.parse(await new Response(stream).text());
}

const unpacked = new Map();

/** Group n of the page, counted over all runs; every signal a list per token again. */
function groupAt(n) {
  if (!unpacked.has(n)) unpacked.set(n, unpack(lines[n + 1]).then(widen));
  return unpacked.get(n);
}

/** One number stands for a list of equal ones. */
const perToken = (values, tokens) => (Array.isArray(values) ? values : Array(tokens.length).fill(values));

function widen(group) {
  for (const answer of group.answers) {
    for (const name of Object.keys(SIGNALS)) if (name in answer) answer[name] = perToken(answer[name], answer.tokens);
    if (!answer.shaped?.some((v) => v)) delete answer.shaped; // of a rule that shapes none
    const { advantage, grpo: even } = answer;
    const relative = (v, t) => (even[t] && isKnown(v) ? v / Math.abs(even[t]) : null);
    if (advantage && even) answer.relative = advantage.map(relative);
    answer.live = answer.live ? answer.live.map(Boolean) : perToken(true, answer.tokens);
  }
  group.credited = group.answers.some((answer) => answer.advantage?.some((v) => v));
  return group;
}

/** Unpack all groups while the page is idle, for whoever is about to search them. */
function unpackAll(n = 0) {
  while (unpacked.has(n)) n++;
  if (n + 1 < lines.length) idle().then(() => groupAt(n)).then(() => unpackAll(n + 1));
}
