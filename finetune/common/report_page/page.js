"use strict";
// Draws the charts of #chart-data with bokeh, plays the samples, and in a live page asks the server for news.
(() => {
  const HEIGHT = 230, SMOOTHED_FROM = 60;  // points
  const STEADY = new Set(["lr"]);  // never smoothed
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { log: false, smooth: true, hidden: new Set(), window: null };  // window: the steps shown, null = all
  const panels = new Map();  // id of a chart -> what is drawn

  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const readCharts = (page) => JSON.parse(page.getElementById("chart-data")?.textContent ?? "[]");

  // ---- numbers ---------------------------------------------------------------------------------------------------

  const show = (value, unit) => {
    if (value === null || Number.isNaN(value)) return "none";
    const size = Math.abs(value);
    const text = size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(3)
      : value.toLocaleString("en", { maximumSignificantDigits: 5 });
    return unit ? `${text} ${unit}` : text;
  };
  const inUnit = (chart, value) => value === null ? NaN : chart.unit === "%" ? 100 * value : value;

  const smoothed = (values) => {  // the mean of the points around each one, so that nothing is delayed
    const reach = Math.max(2, Math.round(values.length / 60));
    return values.map((_, i) => {
      const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter((value) => !Number.isNaN(value));
      return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : NaN;
    });
  };

  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  // ---- charts ----------------------------------------------------------------------------------------------------

  const colourOf = (chart, series, index) => {
    if (series.run !== undefined) return css(`--c${series.run % 8}`);
    const levels = chart.series.filter(({ kind }) => kind === "level").length;
    if (series.kind === "level" && levels === 1) return css("--dim");
    const many = chart.series.length;
    if (many <= 8) return css(`--c${index}`);
    return `hsl(${250 - 235 * index / (many - 1)} 70% ${dark.matches ? 65 : 45}%)`;  // codebooks: in order, blue to red
  };
  const isHidden = (chart, series) => state.hidden.has(`${chart.id}/${series.name}`);
  const isLog = (chart) => state.log && chart.log;

  const wholeRun = () => {
    const xs = [...panels.values()].flatMap(({ chart }) => chart.series.flatMap(({ x }) => [x[0], x[x.length - 1]]));
    const low = Math.min(...xs), high = Math.max(...xs);
    const margin = 0.015 * (high - low) || 1;
    return [low - margin, high + margin];
  };

  const yRange = (chart, [left, right]) => {
    let low = Infinity, high = -Infinity;
    for (const series of chart.series) {
      if (isHidden(chart, series)) continue;
      series.x.forEach((x, i) => {
        const y = inUnit(chart, series.y[i]);
        if ((x < left || x > right) && series.kind !== "level") return;
        if (Number.isNaN(y) || (isLog(chart) && y <= 0)) return;
        low = Math.min(low, y);
        high = Math.max(high, y);
      });
    }
    if (low > high) return isLog(chart) ? [0.1, 1] : [0, 1];
    if (isLog(chart)) return low < high ? [low / (high / low) ** 0.06, high * (high / low) ** 0.06] : [low / 2, high * 2];
    const margin = low < high ? 0.06 * (high - low) : Math.abs(low) * 0.1 || 1;
    return [low - margin, high + margin];
  };

  const newPanel = (chart) => {
    const panel = { chart, figure: null, renderers: [], sources: [], asked: false };
    const note = [chart.unit, chart.note].filter(Boolean).join(", ");
    const title = make("h3", {}, chart.title);
    if (note) title.append(" ", make("span", { className: "small" }, note));
    panel.legend = make("div", { className: "legend" });
    panel.plot = make("div", { className: "plot" });
    panel.tip = make("div", { className: "tip", hidden: true });
    panel.element = make("div", { className: "chart", id: `chart-${chart.id}` }, title, panel.legend, panel.plot, panel.tip);
    panel.plot.addEventListener("pointermove", (event) => point(panel, event));
    panel.plot.addEventListener("pointerleave", () => { panel.tip.hidden = true; });
    panel.plot.addEventListener("dblclick", () => setWindow(null));
    panels.set(chart.id, panel);
    return panel;
  };

  const drawLegend = (panel) => {
    const { chart } = panel;
    if (chart.series.length < 2 && chart.series[0].run === undefined) return;
    panel.legend.replaceChildren(...chart.series.map((series, index) => {
      const colour = make("i");
      colour.style.background = colourOf(chart, series, index);
      const button = make("button", { type: "button" }, colour, series.name);
      button.setAttribute("aria-pressed", String(!isHidden(chart, series)));
      button.addEventListener("click", () => {
        const key = `${chart.id}/${series.name}`;
        if (!state.hidden.delete(key)) state.hidden.add(key);
        draw(panel);
      });
      return button;
    }));
  };

  const columns = (chart, series) => {
    const y = series.y.map((value) => inUnit(chart, value)).map((value) => isLog(chart) && value <= 0 ? NaN : value);
    return { x: series.x, y, smooth: smoothed(y) };
  };
  const isSmoothed = (chart, series) =>
    state.smooth && series.kind === "line" && !STEADY.has(chart.id) && series.x.length >= SMOOTHED_FROM;

  const draw = async (panel) => {
    panel.asked = true;
    const turn = panel.turn = (panel.turn ?? 0) + 1;
    const { chart } = panel, ink = css("--dim"), line = css("--line");
    drawLegend(panel);
    const window = state.window ?? wholeRun(), [bottom, top] = yRange(chart, window);
    const figure = Bokeh.Plotting.figure({
      height: HEIGHT, sizing_mode: "stretch_width", tools: [], toolbar_location: null,
      x_range: new Bokeh.Range1d({ start: window[0], end: window[1] }),
      y_range: new Bokeh.Range1d({ start: bottom, end: top }),
      y_axis_type: isLog(chart) ? "log" : "linear",
      background_fill_color: null, border_fill_color: null, outline_line_color: null, min_border: 4,
    });
    for (const axis of [...figure.xaxis, ...figure.yaxis]) {
      axis.axis_line_color = line;
      axis.major_tick_line_color = line;
      axis.minor_tick_line_color = null;
      axis.major_label_text_color = ink;
      axis.major_label_text_font_size = "11px";
    }
    for (const axis of figure.xaxis) axis.formatter = new Bokeh.BasicTickFormatter({ use_scientific: false });
    for (const grid of figure.grid) grid.grid_line_color = line;
    panel.sources = chart.series.map((series) => new Bokeh.ColumnDataSource({ data: columns(chart, series) }));
    chart.series.forEach((series, index) => {
      const source = panel.sources[index], color = colourOf(chart, series, index);
      if (isHidden(chart, series)) return;
      const fields = [{ field: "x" }, { field: "y" }];
      if (series.kind === "level") {
        figure.line(...fields, { source, color, line_dash: "dashed", line_width: 1.5 });
      } else if (series.kind === "marks") {
        figure.line(...fields, { source, color, line_width: 2 });
        figure.scatter(...fields, { source, color, size: 6 });
      } else if (isSmoothed(chart, series)) {
        figure.line(...fields, { source, color, line_width: 1, line_alpha: 0.3 });
        figure.line(fields[0], { field: "smooth" }, { source, color, line_width: 2 });
      } else {
        figure.line(...fields, { source, color, line_width: 1.5 });
      }
    });
    const touch = matchMedia("(pointer: coarse)").matches;  // there, dragging scrolls the page
    const zoom = new Bokeh.BoxZoomTool({ dimensions: "width" });
    figure.add_tools(new Bokeh.CrosshairTool({ dimensions: "height", line_color: ink, line_alpha: 0.5 }));
    if (!touch) {
      figure.add_tools(zoom);
      figure.toolbar.active_drag = zoom;
    }
    const asDrawn = window.join();
    figure.x_range.change.connect(() => {
      const { start, end } = figure.x_range;
      if (`${start},${end}` !== asDrawn || state.window) setWindow([start, end]);  // also called when nothing changed
    });
    panel.figure = figure;
    const place = make("div");
    panel.plot.replaceChildren(place);
    panel.view?.remove();
    panel.view = null;
    const view = await Bokeh.Plotting.show(figure, place);
    if (turn !== panel.turn) return view.remove();  // drawn anew in the meantime
    panel.view = view;
    panel.element.dataset.drawn = "";
  };

  // All charts show the same steps.
  let moving = false;
  const setWindow = (window) => {
    if (moving) return;
    moving = true;
    state.window = window;
    const [start, end] = window ?? wholeRun();
    for (const { chart, figure } of panels.values()) {
      if (!figure) continue;
      const [bottom, top] = yRange(chart, [start, end]);
      figure.x_range.setv({ start, end });
      figure.y_range.setv({ start: bottom, end: top });
    }
    moving = false;
  };

  const point = (panel, event) => {
    const { chart, figure, tip, view } = panel;
    if (!view) return;
    const frame = view.frame.bbox, place = panel.plot.getBoundingClientRect(), x = event.clientX - place.left;
    if (x < frame.left || x > frame.right) { tip.hidden = true; return; }
    const { start, end } = figure.x_range;
    const step = start + (x - frame.left) / (frame.right - frame.left) * (end - start);
    const rows = chart.series.flatMap((series, index) => {
      if (isHidden(chart, series) || !series.x.length) return [];
      const at = nearest(series.x, step);
      return [{ series, index, x: series.kind === "level" ? null : series.x[at], y: inUnit(chart, series.y[at]) }];
    });
    const steps = rows.filter((row) => row.x !== null).map((row) => row.x);
    const here = steps.reduce((best, x) => Math.abs(x - step) < Math.abs(best - step) ? x : best, steps[0]);
    tip.replaceChildren(make("b", {}, `step ${show(here)}`), ...rows.map((row) => {
      const dot = make("i");
      dot.style.background = colourOf(chart, row.series, row.index);
      const other = row.x !== null && row.x !== here ? ` (step ${show(row.x)})` : "";
      return make("div", {}, dot, make("span", {}, row.series.name + other), make("span", {}, show(row.y, chart.unit)));
    }));
    tip.hidden = false;
    const outer = panel.element.getBoundingClientRect(), room = outer.width - tip.offsetWidth - 4;
    const right = event.clientX - outer.left + 14;
    tip.style.left = `${Math.max(4, right <= room ? right : right - tip.offsetWidth - 28)}px`;
    tip.style.top = `${place.top - outer.top + 8}px`;
  };

  const whenSeen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const panel = [...panels.values()].find(({ element }) => element === entry.target);
      if (entry.isIntersecting && panel && !panel.asked) draw(panel);
    }
  }, { rootMargin: "800px" });

  const layOut = (charts) => {
    whenSeen.disconnect();
    for (const { view } of panels.values()) view?.remove();
    panels.clear();
    for (const section of document.querySelectorAll("[data-group]")) {
      const mine = charts.filter((chart) => chart.group === section.dataset.group).map(newPanel);
      section.querySelector(".charts").replaceChildren(...mine.map(({ element }) => element));
    }
    for (const { element } of panels.values()) whenSeen.observe(element);
  };

  const redraw = () => {
    for (const panel of panels.values()) if (panel.asked) draw(panel);
  };

  const shape = (charts) => JSON.stringify(charts.map(({ id, series }) => [id, series.map(({ name }) => name)]));
  const update = (charts) => {
    const before = [...panels.values()].map(({ chart }) => chart);
    if (shape(before) !== shape(charts)) return layOut(charts);
    for (const chart of charts) {
      const panel = panels.get(chart.id);
      const grown = chart.series.some((series, i) => isSmoothed(chart, series) !== isSmoothed(panel.chart, panel.chart.series[i]));
      panel.chart = chart;
      if (!panel.figure) continue;
      if (grown) { draw(panel); continue; }
      chart.series.forEach((series, i) => { panel.sources[i].data = columns(chart, series); });
    }
    setWindow(state.window);
  };

  // ---- samples ---------------------------------------------------------------------------------------------------

  const wireSounds = (root) => {
    for (const sound of root.querySelectorAll(".sound")) {
      const audio = sound.querySelector("audio"), head = sound.querySelector(".head"), drawn = sound.querySelector(".drawn");
      if (!audio) continue;
      const follow = () => {
        head.style.left = `${100 * audio.currentTime / (audio.duration || 1)}%`;
        if (!audio.paused) requestAnimationFrame(follow);
      };
      audio.addEventListener("play", () => {
        for (const other of document.querySelectorAll("audio")) if (other !== audio) other.pause();
        head.hidden = false;
        follow();
      });
      audio.addEventListener("seeked", follow);
      drawn.addEventListener("click", (event) => {
        const box = drawn.getBoundingClientRect();
        audio.currentTime = (event.clientX - box.left) / box.width * (audio.duration || 0);
        audio.play();
      });
    }
  };

  // ---- live ------------------------------------------------------------------------------------------------------

  // Replaces what the server changed; a card stays while it is being listened to.
  const replaceParts = (page) => {
    let all = true;
    for (const fresh of page.querySelectorAll(".part")) {
      const old = document.getElementById(fresh.id);
      if (!old || old.dataset.text === fresh.innerHTML) continue;
      if ([...old.querySelectorAll("audio")].some((audio) => !audio.paused)) { all = false; continue; }
      const open = [...old.querySelectorAll("details")].map((details) => details.open);
      old.replaceChildren(...fresh.cloneNode(true).childNodes);
      old.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
      old.dataset.text = fresh.innerHTML;
      wireSounds(old);
    }
    return all;
  };

  const PAUSE = 2000;
  const ask = async (path) => {
    const answer = await fetch(path, { cache: "no-store" });
    return answer.ok ? answer.text() : null;
  };
  let known = null;
  const look = async () => {
    try {
      const version = await ask("version"), fresh = known !== null && known !== version ? await ask("./") : "";
      let complete = version !== null && fresh !== null;  // else a file was being replaced
      if (complete && fresh) {
        const page = new DOMParser().parseFromString(fresh, "text/html");
        const groups = (root) => [...root.querySelectorAll("[data-group]")].map((section) => section.dataset.group).join();
        const parts = (root) => [...root.querySelectorAll(".part")].map((part) => part.id).join();
        if (groups(page) !== groups(document) || parts(page) !== parts(document)) return location.reload();
        complete = replaceParts(page);
        update(readCharts(page));
      }
      if (complete) known = version;
      document.body.dataset.live = "connected";
    } catch {  // the server has ended
      document.body.dataset.live = "ended";
      const foot = document.getElementById("foot");
      if (!foot.dataset.ended) foot.prepend("not live any more: ./launch.sh watch has ended · ");
      foot.dataset.ended = "yes";
    }
    setTimeout(look, PAUSE);
  };

  // ---- start -----------------------------------------------------------------------------------------------------

  for (const name of ["log", "smooth"]) {
    document.getElementById(name)?.addEventListener("click", (event) => {
      state[name] = !state[name];
      event.currentTarget.setAttribute("aria-pressed", String(state[name]));
      redraw();
    });
  }
  document.getElementById("reset")?.addEventListener("click", () => setWindow(null));
  dark.addEventListener("change", redraw);
  for (const part of document.querySelectorAll(".part")) part.dataset.text = part.innerHTML;
  wireSounds(document);
  window.Bokeh?.set_log_level("warn");
  if (window.Bokeh) layOut(readCharts(document));
  if ("live" in document.body.dataset) look();
})();
