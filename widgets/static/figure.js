// A picture with its description, a cursor in seconds over its seconds axes, and clicks as fractions of the figure.
function render({ model, el, signal }) {
  const root = document.createElement("div");
  root.className = "audiollm-figure";
  const image = document.createElement("img");
  image.draggable = false;
  const over = document.createElement("div");
  over.className = "audiollm-figure-over";
  root.append(image, over);
  el.append(root);
  let url = null;

  const picture = () => {
    const bytes = model.get("png");
    const old = url;
    url = bytes?.byteLength ? URL.createObjectURL(new Blob([bytes], { type: "image/png" })) : null;
    if (url) image.src = url;
    root.style.display = url ? "" : "none";
    if (old) URL.revokeObjectURL(old);
    image.alt = model.get("alt");
  };

  const line = (style) => {
    const mark = document.createElement("div");
    Object.assign(mark.style, style);
    over.append(mark);
    return mark;
  };
  const percent = (fraction) => `${100 * fraction}%`;

  const cursor = () => {
    over.replaceChildren();
    const now = model.get("cursor_s");
    if (now === null || now === undefined) return;
    for (const box of model.get("boxes")) {
      const span = (limits) => (now - limits[0]) / (limits[1] - limits[0]);
      if (box.along.includes("x")) {
        const at = span(box.x);
        if (at >= 0 && at <= 1) {
          line({ left: percent(box.left + at * (box.right - box.left)), top: percent(1 - box.top),
                 height: percent(box.top - box.bottom), width: "0" }).className = "audiollm-cursor-x";
        }
      }
      if (box.along.includes("y")) {
        const at = span(box.y);
        if (at >= 0 && at <= 1) {
          line({ top: percent(1 - (box.bottom + at * (box.top - box.bottom))), left: percent(box.left),
                 width: percent(box.right - box.left), height: "0" }).className = "audiollm-cursor-y";
        }
      }
    }
    const bytes = model.get("track");
    if (bytes?.byteLength) {
      const rows = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
      let k = 0;
      while (k + 3 < rows.length && rows[k + 3] <= now + 1e-6) k += 3;
      line({ left: percent(rows[k + 1]), top: percent(1 - rows[k + 2]) }).className = "audiollm-cursor-dot";
    }
  };

  root.addEventListener("click", (event) => {
    const frame = image.getBoundingClientRect();
    if (!frame.width) return;
    model.send({ event: "click", x: (event.clientX - frame.left) / frame.width, y: 1 - (event.clientY - frame.top) / frame.height });
  }, { signal });
  model.on("change:png", picture);
  model.on("change:alt", () => { image.alt = model.get("alt"); });
  for (const name of ["cursor_s", "boxes", "track"]) model.on(`change:${name}`, cursor);
  picture();
  cursor();
  return () => { if (url) URL.revokeObjectURL(url); };
}

export default { render };
