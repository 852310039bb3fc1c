// Tells whether the page hears from its server, and calls back when there is something new.

const live = document.getElementById("live");

function tell(word, on) {
  live.textContent = word;
  live.classList.toggle("on", on);
}

// Follows the server: `changed(version)`, `closing()` when it is about to end, `lost()` when it does not answer. While
// the page is hidden nothing is asked.
export function follow({ changed, closing, lost }) {
  let source = null;
  let over = false;
  const open = () => {
    source = new EventSource("api/stream");
    source.addEventListener("changed", (event) => changed(Number(event.data)));
    source.addEventListener("closing", () => {
      over = true;
      source.close();
      tell("closed", false);
      closing();
    });
    source.onopen = () => tell("live", true);
    source.onerror = () => {
      if (over) return;
      tell("not connected", false);
      lost();
    };
  };
  document.addEventListener("visibilitychange", () => {
    if (over) return;
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) open();
  });
  open();
}

// A run that has finished is not "live", though its server is there.
export const rest = (phase) => live.textContent === "live" && phase === "finished" && tell("finished", true);
