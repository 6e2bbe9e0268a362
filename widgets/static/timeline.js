// Sources on one axis of seconds: waveform, mel, windows, tokens, markers; playback by slices; selection, loop and zoom.
// Pictures and samples come from the kernel; nothing is decoded here. Seconds are of the source, as everywhere.

const SLICE_S = 10;      // seconds of audio that one request brings
const AHEAD_S = 1.5;     // seconds of audio that are scheduled before they are heard
const CACHED_SLICES = 12;
const LABEL = 16, WAVE = 64, MEL = 80, STRIP = 14, GAP = 10, RULER = 20;
const TRACK = LABEL + WAVE + MEL + STRIP + GAP;
const BLUE = "#0072B2", ORANGE = "#E69F00", RED = "#D55E00";
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const typed = (Type, view) => new Type(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

// ---- playing ---------------------------------------------------------------------------------------------------------

class Player {
  constructor(model) {
    this.model = model;
    this.slices = new Map();
    this.waiting = new Map();
    this.pieces = [];
    this.listeners = new Set();
    this.on = false;
    model.on("msg:custom", (message, buffers) => this.take(message, buffers));
    model.on("change:playing", () => { if (model.get("playing") !== this.on) this.model.get("playing") ? this.play() : this.pause(); });
    model.on("change:cursor_s", () => { if (!this.on) this.tick(); });
    model.on("change:source", () => { if (this.on) { this.halt(); this.tell(); } });
  }

  track() { return this.model.get("tracks")[this.model.get("source")]; }

  range() {  // what is played: the selection, where the cursor is in it or loops; else to the end
    const sel = this.model.get("selection");
    const mine = sel.length && sel[0] === this.model.get("source");
    return mine ? [sel[1], sel[2]] : [0, this.track().used_s];
  }

  now() {
    if (!this.on) return this.model.get("cursor_s");
    const t = this.context.currentTime;
    const piece = this.pieces.find((p) => t < p.at + p.length) ?? this.pieces[this.pieces.length - 1];
    if (!piece) return this.position;
    return clamp(piece.from + t - piece.at, piece.from, piece.from + piece.length);
  }

  async play() {
    if (this.on) return;
    const track = this.track();
    this.context ??= new AudioContext({ sampleRate: track.sample_rate });
    this.on = true;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    await this.context.resume();
    if (!this.on || turn !== this.turn) return;
    const [start, end] = this.range();
    let from = this.model.get("cursor_s");
    if (from < start || from >= end - 0.005) from = start;
    this.position = from;
    this.due = null;
    this.tell();
    this.timer = setInterval(() => this.schedule(), 100);
    this.schedule();
    const frame = () => { if (!this.on || turn !== this.turn) return; this.tick(); requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
  }

  schedule() {
    const track = this.track(), time = this.context.currentTime;
    if (this.due !== null && this.pieces.length && this.ended && time >= this.due) { this.pause(true); return; }
    while (this.on && !this.ended && (this.due === null || this.due < time + AHEAD_S)) {
      const [start, end] = this.range();
      if (this.position >= end - 1e-6) {
        if (this.model.get("loop") && end - start >= 0.02) this.position = start;
        else { this.ended = true; break; }
      }
      const number = Math.floor(this.position / SLICE_S + 1e-9);
      const samples = this.slice(this.model.get("source"), number);
      if (!samples) return;  // it is on its way; this is called again when it is here
      const first = Math.round(this.position * track.sample_rate) - Math.round(number * SLICE_S * track.sample_rate);
      const stop = Math.min(end, (number + 1) * SLICE_S);
      const length = Math.min(Math.round((stop - this.position) * track.sample_rate), samples.length - first);
      if (length <= 0) { this.position = end; continue; }
      const buffer = this.context.createBuffer(1, length, track.sample_rate);
      buffer.copyToChannel(samples.subarray(first, first + length), 0);
      const node = this.context.createBufferSource();
      node.buffer = buffer;
      node.connect(this.context.destination);
      const at = Math.max(this.due ?? 0, time + 0.02);
      node.start(at);
      this.pieces.push({ node, at, from: this.position, length: length / track.sample_rate });
      this.due = at + length / track.sample_rate;
      this.position += length / track.sample_rate;
      if (this.position < end) this.slice(this.model.get("source"), number + 1);
    }
    while (this.pieces.length > 1 && this.pieces[0].at + this.pieces[0].length < time - 0.5) this.pieces.shift();
  }

  slice(source, number) {  // samples of a slice, or null and a request for it
    const key = `${source}:${number}`;
    if (this.slices.has(key)) return this.slices.get(key);
    const track = this.model.get("tracks")[source];
    const first = Math.round(number * SLICE_S * track.sample_rate);
    if (first >= track.n_samples || this.waiting.has(key)) return null;
    this.waiting.set(key, first);
    this.model.send({ event: "audio", source, first, count: Math.round(SLICE_S * track.sample_rate) });
    return null;
  }

  take(message, buffers) {
    if (message.event !== "audio") return;
    const track = this.model.get("tracks")[message.source];
    const key = `${message.source}:${Math.round(message.first / (SLICE_S * track.sample_rate))}`;
    const whole = typed(Int16Array, buffers[0]);
    const samples = new Float32Array(whole.length);
    for (let i = 0; i < whole.length; i++) samples[i] = whole[i] / 32767;
    this.waiting.delete(key);
    this.slices.set(key, samples);
    if (this.slices.size > CACHED_SLICES) this.slices.delete(this.slices.keys().next().value);
    if (this.on) this.schedule();
  }

  pause(atEnd = false) {
    if (!this.on) return;
    const here = atEnd ? this.range()[1] : this.now();
    this.halt();
    this.set("cursor_s", here);
    this.tell();
    this.tick();
  }

  halt() {
    this.on = false;
    this.ended = false;
    clearInterval(this.timer);
    for (const piece of this.pieces) { try { piece.node.stop(); } catch { /* it never began */ } piece.node.disconnect(); }
    this.pieces = [];
    this.due = null;
  }

  seek(second) {  // within the active source, playing or not
    const playing = this.on;
    if (playing) this.halt();
    this.set("cursor_s", clamp(second, 0, this.track().used_s));
    this.tick();
    if (playing) this.play();
  }

  tell() { this.set("playing", this.on); }

  set(name, value) {
    if (this.model.get(name) === value) return;
    this.model.set(name, value);
    this.model.save_changes();
  }

  tick() {  // every picture of the browser; the kernel hears of it at most ten times a second
    for (const listener of this.listeners) listener();
    const time = performance.now();
    if (this.on && time - (this.told ?? 0) > 100) { this.told = time; this.set("cursor_s", this.now()); }
  }

  close() {
    this.halt();
    this.listeners.clear();
    this.context?.close();
    this.context = null;
    this.slices.clear();
  }
}

// One player a model, whatever number of views it has. The model objects handed to `initialize` and `render` differ.
const players = new Map();

function initialize({ model }) {
  const key = model.get("key"), player = new Player(model);
  players.set(key, player);
  return () => { player.close(); players.delete(key); };
}

// ---- units -----------------------------------------------------------------------------------------------------------

function moment(track, second) {  // the same whole-number arithmetic as SourceTimeline.at
  let sample = Math.floor(second * track.sample_rate);
  while ((sample + 1) / track.sample_rate <= second) sample += 1;
  while (sample / track.sample_rate > second) sample -= 1;
  const inside = Math.min(sample, track.n_samples - 1);
  const frame = Math.floor(inside / track.samples_per_frame), part = Math.floor(inside / track.samples_per_window);
  let token = Math.floor(Math.min(sample, track.n_samples) / track.samples_per_token);
  if (token >= track.n_tokens) {
    const reaches = track.n_tokens * track.samples_per_token >= track.n_samples;
    token = sample >= track.n_samples && reaches ? track.n_tokens - 1 : null;
  }
  return {
    frame: frame < track.n_frames ? frame : null,
    window: part < track.n_windows ? part : null,
    token,
    position: token === null ? null : track.where[token],
  };
}

function words(track, second) {
  const m = moment(track, second), say = (v) => v ?? "none";
  return `${second.toFixed(3)} s · mel frame ${say(m.frame)} · window ${say(m.window)} · token ${say(m.token)} · position ${say(m.position)}`;
}

// ---- the picture -----------------------------------------------------------------------------------------------------

function button(bar, text, title) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.title = title;
  bar.append(made);
  return made;
}

function render({ model, el, signal }) {
  const player = players.get(model.get("key"));
  const tracks = model.get("tracks").map((t) => ({ ...t, where: typed(Int32Array, t.positions) }));
  const colours = typed(Uint8Array, model.get("colours"));
  const longest = Math.max(...tracks.map((t) => t.used_s));
  const finest = Math.min(...tracks.map((t) => 8 * t.samples_per_token / t.sample_rate));
  const details = new Map();
  const images = new Map();

  const root = document.createElement("div");
  root.className = "audiollm-timeline";
  root.dataset.lmSuppressShortcuts = "true";  // JupyterLab's command keys (b, x, dd) must not reach the notebook
  const stage = document.createElement("div");
  stage.className = "audiollm-stage";
  stage.tabIndex = 0;
  stage.dataset.lmSuppressShortcuts = "true";
  stage.setAttribute("role", "slider");
  stage.style.height = `${RULER + TRACK * tracks.length}px`;
  const base = document.createElement("canvas"), over = document.createElement("canvas");
  stage.append(base, over);
  const bar = document.createElement("div");
  bar.className = "audiollm-bar";
  const play = button(bar, "Play", "Play or stop (Space)");
  const loop = button(bar, "Loop", "Repeat the selection (L)");
  const closer = button(bar, "Zoom in", "Show half as many seconds (+)");
  const wider = button(bar, "Zoom out", "Show twice as many seconds (−)");
  const fit = button(bar, "All", "Show the whole source (0)");
  const out = document.createElement("output");
  out.setAttribute("aria-live", "off");
  bar.append(out);
  const state = document.createElement("div");
  state.className = "audiollm-state";
  root.append(stage, bar, state);
  el.append(root);

  const on = (target, name, act, options) => target.addEventListener(name, act, { signal, ...options });
  const view = () => model.get("view");
  const toX = (t) => (t - view()[0]) / (view()[1] - view()[0]) * stage.clientWidth;
  const toS = (x) => view()[0] + x / Math.max(1, stage.clientWidth) * (view()[1] - view()[0]);
  const top = (k) => RULER + TRACK * k;
  const ink = () => getComputedStyle(root).getPropertyValue("--jp-ui-font-color1").trim() || "#222";
  let hover = null, drag = null;

  function set(changes) {
    for (const [name, value] of Object.entries(changes)) model.set(name, value);
    model.save_changes();
  }

  function look(start, end) {
    const span = clamp(end - start, Math.min(finest, longest), longest);
    start = clamp(start, 0, longest - span);
    set({ view: [start, start + span] });
  }

  function zoom(factor, around = player.now()) {
    const [a, b] = view();
    const at = clamp(around, a, b);
    look(at - (at - a) * factor, at + (b - at) * factor);
  }

  // The mel as a bitmap, coloured once.
  function bitmap(key, bytes, columns, bands) {
    if (images.has(key)) return images.get(key);
    const made = document.createElement("canvas");
    made.width = columns;
    made.height = bands;
    const g = made.getContext("2d"), pixels = g.createImageData(columns, bands);
    const grey = typed(Uint8Array, bytes);
    for (let m = 0; m < bands; m++) {
      for (let c = 0; c < columns; c++) {
        const from = 3 * grey[m * columns + c], to = 4 * ((bands - 1 - m) * columns + c);
        pixels.data[to] = colours[from]; pixels.data[to + 1] = colours[from + 1];
        pixels.data[to + 2] = colours[from + 2]; pixels.data[to + 3] = 255;
      }
    }
    g.putImageData(pixels, 0, 0);
    images.set(key, made);
    return made;
  }

  // The finest picture there is of what is shown: the whole source's, or a stretch that the kernel drew anew.
  function drawn(k) {
    const t = tracks[k], d = details.get(k), [a, b] = view();
    const coarse = { start: 0, end: t.used_s, peaks: typed(Float32Array, t.peaks), columns: t.mel_columns, mel: t.mel, key: `${k}` };
    if (!d || b - a > 0.6 * (t.n_samples / t.sample_rate)) return coarse;
    return d.start <= a + 1e-6 && d.end >= Math.min(b, t.used_s) - 1e-6 ? d : coarse;
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1, width = stage.clientWidth, height = stage.clientHeight;
    if (!width) return;
    for (const canvas of [base, over]) {
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
    }
    const g = base.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    g.font = "11px sans-serif";
    g.textBaseline = "top";
    ruler(g, width);
    tracks.forEach((t, k) => { source(g, t, k, width); });
    drawOver();
  }

  function ruler(g, width) {
    const [a, b] = view(), rough = (b - a) / Math.max(2, width / 90);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    g.fillStyle = g.strokeStyle = ink();
    for (let i = Math.ceil(a / step - 1e-9); i * step <= b + 1e-9; i++) {
      const x = toX(i * step);
      g.fillRect(x, 12, 1, 6);
      g.fillText(`${(i * step).toFixed(places)} s`, x + 3, 0);
    }
  }

  function source(g, t, k, width) {
    const y = top(k), d = drawn(k), seconds = d.end - d.start;
    const right = Math.min(width, toX(t.used_s)), left = Math.max(0, toX(0));
    g.fillStyle = ink();
    const active = k === model.get("source");
    g.font = active ? "bold 11px sans-serif" : "11px sans-serif";
    g.fillText(`${active ? "▶ " : ""}${k}: ${t.name} (${t.used_s.toFixed(2)} s, ${t.n_windows} windows, ${t.n_tokens} tokens)`, 4, y + 2);
    g.font = "11px sans-serif";
    // Waveform, at its true level: full scale is the height of its strip.
    const n = d.peaks.length / 2, middle = y + LABEL + WAVE / 2, half = WAVE / 2 - 1;
    g.fillStyle = BLUE;
    for (let x = Math.floor(left); x < right; x++) {
      const i = clamp(Math.floor((toS(x) - d.start) / seconds * n), 0, n - 1);
      const j = clamp(Math.ceil((toS(x + 1) - d.start) / seconds * n), i + 1, n);
      let low = Infinity, high = -Infinity;
      for (let p = i; p < j; p++) { low = Math.min(low, d.peaks[2 * p]); high = Math.max(high, d.peaks[2 * p + 1]); }
      low = clamp(low, -1, 1); high = clamp(high, -1, 1);
      g.fillRect(x, middle - high * half, 1, Math.max(1, (high - low) * half));
    }
    // Mel.
    const image = bitmap(d.key, d.mel, d.columns, t.mel_bands);
    g.imageSmoothingEnabled = false;
    const per = d.columns / seconds;
    const from = Math.max(d.start, view()[0]), to = Math.min(d.end, view()[1]);
    if (to > from) {
      g.drawImage(image, (from - d.start) * per, 0, (to - from) * per, t.mel_bands, toX(from), y + LABEL + WAVE, toX(to) - toX(from), MEL);
    }
    // Windows or chunks as boxes, tokens as ticks where they can be told apart, markers as triangles.
    const strip = y + LABEL + WAVE + MEL;
    for (let w = 0; w < t.n_windows; w++) {
      const a = toX(w * t.samples_per_window / t.sample_rate);
      const b = toX(Math.min((w + 1) * t.samples_per_window, t.n_samples) / t.sample_rate);
      if (b < 0 || a > width) continue;
      g.strokeStyle = w % 2 ? ORANGE : ink();
      g.setLineDash(w % 2 ? [4, 3] : []);
      g.strokeRect(a + 0.5, y + LABEL + 0.5, Math.max(1, b - a - 1), WAVE + MEL + STRIP - 1);
      g.setLineDash([]);
      if (b - a > 24) { g.fillStyle = ink(); g.fillText(`w${w}`, Math.max(a, 0) + 3, y + LABEL + 2); }
    }
    const token = t.samples_per_token / t.sample_rate, wide = token / (view()[1] - view()[0]) * width;
    g.fillStyle = ink();
    if (wide >= 4) {
      const first = Math.max(0, Math.floor(view()[0] / token)), last = Math.min(t.n_tokens, Math.ceil(view()[1] / token));
      for (let i = first; i < last; i++) {
        const x = toX(i * token);
        g.fillRect(x, strip, 1, STRIP - 2);
        if (wide >= 28) g.fillText(`${i}`, x + 2, strip + 1);
      }
    }
    g.fillStyle = RED;
    for (const second of t.markers) {
      const x = toX(second);
      if (x < -5 || x > width + 5) continue;
      g.beginPath(); g.moveTo(x - 4, y + LABEL); g.lineTo(x + 4, y + LABEL); g.lineTo(x, y + LABEL + 7); g.fill();
    }
  }

  function drawOver() {
    const ratio = window.devicePixelRatio || 1, g = over.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, over.width, over.height);
    const sel = drag?.moved ? [drag.source, ...drag.range] : model.get("selection");
    if (sel.length) {
      g.fillStyle = ORANGE; g.globalAlpha = 0.3;
      const a = toX(sel[1]), b = toX(sel[2]), y = top(sel[0]) + LABEL;
      g.fillRect(a, y, b - a, WAVE + MEL + STRIP);
      g.globalAlpha = 1; g.strokeStyle = ORANGE; g.lineWidth = 2;
      g.strokeRect(a, y + 1, b - a, WAVE + MEL + STRIP - 2);
      g.lineWidth = 1;
    }
    const now = player.now(), x = toX(now);
    g.fillStyle = RED;
    g.fillRect(x - 1, 0, 2, stage.clientHeight);
    if (hover) { g.fillStyle = ink(); g.globalAlpha = 0.5; g.fillRect(toX(hover.second), top(hover.source), 1, TRACK - GAP); g.globalAlpha = 1; }
    const t = tracks[model.get("source")];
    out.textContent = hover ? `${hover.source}: ${words(tracks[hover.source], hover.second)}` : words(t, clamp(now, 0, t.used_s));
    if (player.on && (now > view()[1] || now < view()[0])) { const span = view()[1] - view()[0]; look(now - 0.1 * span, now + 0.9 * span); }
  }

  function tellState() {
    const t = tracks[model.get("source")], now = clamp(player.now(), 0, t.used_s), sel = model.get("selection");
    stage.setAttribute("aria-label", `Timeline of ${tracks.length} source(s), ${t.name} is active`);
    stage.setAttribute("aria-valuemin", "0");
    stage.setAttribute("aria-valuemax", t.used_s.toFixed(3));
    stage.setAttribute("aria-valuenow", now.toFixed(3));
    stage.setAttribute("aria-valuetext", words(t, now));
    play.textContent = player.on ? "Stop" : "Play";
    play.setAttribute("aria-pressed", String(player.on));
    loop.setAttribute("aria-pressed", String(model.get("loop")));
    const chosen = sel.length ? tracks[sel[0]] : null;
    state.textContent = chosen ? `selected in source ${sel[0]}: ${sel[1].toFixed(3)}–${sel[2].toFixed(3)} s, ${(sel[2] - sel[1]).toFixed(3)} s` : "";
  }

  // Finer pictures, once zooming has come to rest.
  let asking = 0;
  function refine() {
    clearTimeout(asking);
    asking = setTimeout(() => {
      const [a, b] = view(), span = b - a;
      tracks.forEach((t, k) => {
        if (span > 0.5 * t.used_s || a >= t.used_s || drawn(k).start !== 0 || drawn(k) === details.get(k)) return;
        const first = Math.max(0, Math.floor((a - span / 2) * t.sample_rate));
        const end = Math.min(t.n_samples, Math.ceil((b + span / 2) * t.sample_rate));
        model.send({ event: "detail", source: k, first, end });
      });
    }, 120);
  }

  let serial = 0;
  function take(message, buffers) {
    if (message.event !== "detail") return;
    const t = tracks[message.source], old = details.get(message.source);
    if (old) images.delete(old.key);
    details.set(message.source, {
      start: message.first / t.sample_rate, end: message.end / t.sample_rate, peaks: typed(Float32Array, buffers[0]),
      columns: message.mel_columns, mel: buffers[1], key: `detail${++serial}`,
    });
    draw();
  }

  // Pointer: click seeks, dragging selects.
  const place = (event) => {
    const frame = stage.getBoundingClientRect();
    const k = clamp(Math.floor((event.clientY - frame.top - RULER) / TRACK), 0, tracks.length - 1);
    return { source: k, x: event.clientX - frame.left, second: clamp(toS(event.clientX - frame.left), 0, tracks[k].used_s) };
  };
  on(stage, "pointerdown", (event) => {
    if (event.button !== 0) return;
    const at = place(event);
    drag = { ...at, moved: false };
    stage.setPointerCapture(event.pointerId);
    stage.focus({ preventScroll: true });
    event.preventDefault();
  });
  on(stage, "pointermove", (event) => {
    const at = place(event);
    hover = at;
    if (drag) {
      const second = clamp(toS(at.x), 0, tracks[drag.source].used_s);
      drag.moved = drag.moved || Math.abs(at.x - drag.x) > 3;
      drag.range = [Math.min(drag.second, second), Math.max(drag.second, second)];
    }
    drawOver();
  });
  const finish = (event, keep) => {
    if (!drag) return;
    const done = drag;
    drag = null;
    if (!keep) { drawOver(); return; }
    if (done.source !== model.get("source")) { if (player.on) player.pause(); set({ source: done.source }); }
    if (done.moved && done.range[1] > done.range[0]) {
      set({ selection: [done.source, ...done.range] });
      player.seek(done.range[0]);
    } else player.seek(done.second);
    draw();
  };
  on(stage, "pointerup", (event) => finish(event, true));
  on(stage, "pointercancel", (event) => finish(event, false));
  on(stage, "pointerleave", () => { hover = null; drawOver(); });
  on(stage, "wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;  // a plain wheel scrolls the notebook
    event.preventDefault();
    const turn = event.deltaY || event.deltaX;
    if (event.ctrlKey) zoom(turn > 0 ? 1.25 : 0.8, place(event).second);
    else { const [a, b] = view(), by = Math.sign(turn) * (b - a) / 10; look(a + by, b + by); }
  }, { passive: false });

  const toggle = () => (player.on ? player.pause() : player.play());
  const chooseSource = (by) => {
    const to = clamp(model.get("source") + by, 0, tracks.length - 1);
    if (to === model.get("source")) return;
    if (player.on) player.pause();
    set({ source: to, cursor_s: Math.min(player.now(), tracks[to].used_s) });
  };
  const keys = {
    " ": toggle,
    ArrowLeft: (e) => player.seek(player.now() - (e.shiftKey ? 5 : 1)),
    ArrowRight: (e) => player.seek(player.now() + (e.shiftKey ? 5 : 1)),
    ArrowUp: () => chooseSource(-1),
    ArrowDown: () => chooseSource(1),
    Home: () => player.seek(0),
    End: () => player.seek(tracks[model.get("source")].used_s),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: () => look(0, longest),
    l: () => set({ loop: !model.get("loop") }),
    L: () => set({ loop: !model.get("loop") }),
    Escape: () => { if (player.on) player.pause(); set({ selection: [] }); },
  };
  on(stage, "keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = keys[event.key];
    if (event.key === "Tab") return;
    event.stopPropagation();  // whatever it is, it is not the notebook's
    if (act) { event.preventDefault(); act(event); }
  });
  on(play, "click", toggle);
  on(loop, "click", keys.l);
  on(closer, "click", () => zoom(0.5));
  on(wider, "click", () => zoom(2));
  on(fit, "click", () => look(0, longest));
  on(bar, "keydown", (event) => event.stopPropagation());

  // What the kernel changes, and the theme.
  const tick = () => { drawOver(); tellState(); };
  player.listeners.add(tick);
  const whole = () => { draw(); tellState(); };
  const moved = () => { if (!player.on || Math.abs(model.get("cursor_s") - player.now()) < 0.3) return; player.seek(model.get("cursor_s")); };
  const heard = { "change:view": () => { draw(); refine(); }, "change:selection": whole, "change:source": whole, "change:loop": tellState,
    "change:playing": tellState, "change:cursor_s": () => { moved(); tick(); }, "msg:custom": take };
  for (const [name, act] of Object.entries(heard)) model.on(name, act);
  const resize = new ResizeObserver(draw);
  resize.observe(stage);
  const theme = new MutationObserver(draw);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  whole();
  return () => {
    resize.disconnect();
    theme.disconnect();
    clearTimeout(asking);
    player.listeners.delete(tick);
    if (!player.listeners.size && player.on) player.pause();
    for (const [name, act] of Object.entries(heard)) model.off(name, act);
  };
}

export default { initialize, render };
