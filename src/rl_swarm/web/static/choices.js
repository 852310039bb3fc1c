// Fills the box in which a user chooses one node of the swarm.

import { get } from "./api.js";
import { h } from "./dom.js";

const MAX = 1000;

// Returns a function that reads the nodes when their number has changed. `chosen` is selected once it is known.
export function nodeChoice(select, chosen) {
  let known = -1;
  return async (total) => {
    if (total === known) return;
    known = total;
    const page = await get("api/nodes", { sort: "name", descending: false, limit: MAX });
    const value = select.value || chosen;
    select.replaceChildren(h("option", { value: "" }, "all"), ...page.nodes.map((row) => h("option", { value: row.node, selected: row.node === value }, row.name)));
  };
}
