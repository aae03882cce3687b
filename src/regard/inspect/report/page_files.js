// Files that a page saves: tables as CSV, and any others.
function saveFile(name, content, kind) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([content], { type: kind }));
  link.download = `${nameOf(state.layer, state.head).replaceAll(" ", "-")}-${name}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// A table as RFC 4180 has it: texts in quotes, numbers with 6 digits.
function saveTable(name, head, rows) {
  const field = (value) => (typeof value === "string" ? `"${value.replaceAll('"', '""')}"` : String(value));
  const lines = [head, ...rows].map((row) => row.map(field).join(","));
  saveFile(name, `${lines.join("\r\n")}\r\n`, "text/csv");
}

const digits = (weight) => Number(weight.toPrecision(6));
