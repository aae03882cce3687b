// The circuits of the head that is shown, from the model's weights alone: what it copies and what it seeks.
const circuitRows = data.circuits && new Map(data.circuits.tokens.map((text, n) => [text, n]));

function showCircuits(one) {
  at("circuits").hidden = !data.circuits;
  if (!data.circuits) return;
  const text = token(chosenAxis(one), chosen()),
    n = circuitRows.get(text),
    layer = data.circuits.layers[state.layer];
  listTokens("raised", n, layer.raised, `a head that reads ${isolated(text)} raises`);
  listTokens("sought", n, layer.sought, `a query at ${isolated(text)} seeks`);
}

// A sentence about one token, the tokens that it leads to, and the place of the token itself among all of them.
function listTokens(id, n, heads, sentence) {
  const line = at(id);
  line.hidden = n === undefined || !heads.length;
  at("no-circuit").hidden = n !== undefined;
  if (line.hidden) return;
  const [others, rank] = heads[state.head][n];
  const words = others.map((other) => tokenElement("word", data.circuits.names[other]));
  const own = `rank of itself: ${rank.toLocaleString("en")} (0 is first)`;
  line.replaceChildren(`${sentence} `, ...words.flatMap((word) => [word, " "]), element("small", "quiet", own));
}
