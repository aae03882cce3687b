// The address of a page: the head that is shown, a query and a key, and what differs from the first of CHOICES.
const within = (value, count) => Math.min(Math.max(Math.trunc(value) || 0, 0), count - 1);

function chosenParts() {
  const others = Object.entries(CHOICES).filter(([name, values]) => state[name] !== values[0]);
  return [`query=${state.query}`, `key=${state.key}`, ...others.map(([name]) => `${name}=${state[name]}`)];
}

// Takes the head, of the first `count` layers, the numbers and the choices that an address says, and leaves the rest as it
// is. Returns all that it says; null where it names no head.
function readHead(address, count, numbers) {
  const [name, ...parts] = address.replace(/^#/, "").split("&"),
    found = /^(.*L(\d+))H(\d+)$/.exec(decodeURI(name)),
    given = new URLSearchParams(parts.join("&"));
  if (!found) return null;
  const named = data.layers.slice(0, count).findIndex((one) => one.place === found[1]);
  state.layer = named < 0 ? within(found[2], count) : named;
  state.head = Number(found[3]);
  numbers.forEach((number) => given.has(number) && (state[number] = Number(given.get(number))));
  Object.entries(CHOICES).forEach(([choice, values]) => {
    if (values.includes(given.get(choice))) state[choice] = given.get(choice);
  });
  return given;
}

function writeAddress() {
  // A frame made of a string (a notebook's) has no address of its own.
  if (location.protocol !== "about:" && location.hash !== written()) history.replaceState(null, "", written());
}

// Has links to heads, and the address when it is edited, show what they name; `before` is called for a link.
function followAddresses(before = () => {}) {
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    if (!link) return;
    event.preventDefault(); // a notebook's frame would follow the link to the notebook's own address
    readAddress(link.getAttribute("href"));
    before();
    choose();
    at("viewer").scrollIntoView({ block: "start" });
  });
  window.addEventListener("hashchange", () => {
    readAddress(location.hash);
    choose();
  });
}
