// Saves a chart as a picture: its title, its curves and its legend.

const ROW = 20; // pixels of a line of the legend
const MARGIN = 16;

export function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Places the legend in rows no wider than the picture.
function placed(context, entries, width) {
  let [x, row] = [MARGIN, 0];
  return entries.map((entry) => {
    const size = context.measureText(entry.text).width + 38;
    if (x + size > width - MARGIN && x > MARGIN) [x, row] = [MARGIN, row + 1];
    const found = { ...entry, x, row };
    x += size;
    return found;
  });
}

export function savePicture({ title, plot, entries, background, text }) {
  const source = plot.ctx.canvas;
  const scale = source.width / plot.width;
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d");
  context.font = "13px system-ui";
  const legend = placed(context, entries, plot.width);
  const rows = legend.length ? legend.at(-1).row + 1 : 0;
  canvas.width = source.width;
  canvas.height = Math.ceil(scale * (plot.height + 40 + rows * ROW + MARGIN));
  context.scale(scale, scale);
  context.fillStyle = background;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = text;
  context.font = "600 15px system-ui";
  context.fillText(title, MARGIN, 26, plot.width - 2 * MARGIN);
  context.drawImage(source, 0, 40, plot.width, plot.height);
  context.font = "13px system-ui";
  for (const { x, row, text: words, color } of legend) {
    const y = 40 + plot.height + (row + 0.8) * ROW;
    context.fillStyle = color;
    context.fillRect(x, y - 6, 12, 4);
    context.fillStyle = text;
    context.fillText(words, x + 18, y);
  }
  const name = title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "");
  canvas.toBlob((blob) => blob && saveBlob(blob, `${name || "chart"}.png`), "image/png");
}
