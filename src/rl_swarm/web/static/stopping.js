// Stops the run for a user with the token. The token stays in memory.

import { post } from "./api.js";
import { h } from "./dom.js";

let token = "";

const input = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
const message = h("p", { class: "failure", role: "alert", hidden: true });
const form = h("form", { onsubmit: stop },
  h("h2", {}, "Stop the run?"),
  h("p", {}, "The nodes save their state, and this page closes. Resume later with ", h("code", {}, "rl-swarm up --resume"), "."),
  h("label", { for: "token" }, "Token (SWARM_WEB_TOKEN)", input), message,
  h("div", { class: "pages" }, h("button", { class: "danger" }, "Stop the run"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
const dialog = h("dialog", { "aria-label": "Stop the run" }, form);
const button = document.getElementById("stop");
document.body.append(dialog);
button.addEventListener("click", () => {
  input.value = token;
  message.hidden = true;
  dialog.showModal();
});

async function stop(event) {
  event.preventDefault();
  try {
    await post("api/stop", input.value);
    token = input.value;
    button.textContent = "Stopping";
    button.disabled = true;
    dialog.close();
  } catch (error) {
    message.textContent = error.message;
    message.hidden = false;
  }
}

export const offer = (possible) => { button.hidden = !possible; };
