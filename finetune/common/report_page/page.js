"use strict";
// Draws the charts with bokeh, plays the samples, and in a live page asks the server for news.
(async () => {
  const readPoints = (page) => JSON.parse(page.getElementById("points").textContent);
  const points = readPoints(document);

  const figures = Object.keys(points.roots);
  if (figures.length) {
    await Bokeh.embed.embed_items({ charts: points.document }, [{ docid: "charts", roots: points.roots, root_ids: figures }]);
  }

  // ---- samples: one plays at a time, and a click on its picture plays from there
  const wireSounds = (root) => {
    for (const sound of root.querySelectorAll(".sound:has(audio)")) {
      const audio = sound.querySelector("audio"), picture = sound.querySelector(".drawn");
      audio.addEventListener("play", () => {
        for (const other of document.querySelectorAll("audio")) if (other !== audio) other.pause();
      });
      audio.addEventListener("timeupdate", () => {
        sound.querySelector(".head").style.left = `${100 * audio.currentTime / audio.duration}%`;
      });
      picture.addEventListener("click", (event) => {
        audio.currentTime = event.offsetX / picture.offsetWidth * audio.duration;
        audio.play();
      });
    }
  };
  wireSounds(document);

  // ---- live: replaces what changed; a part stays while one of its sounds plays
  const written = (page) => new Map([...page.querySelectorAll(".part")].map((part) => [part.id, part.innerHTML]));
  let shown = written(document);
  const replaceParts = (page) => {
    for (const [id, html] of written(page)) {
      const part = document.getElementById(id);
      if (shown.get(id) === html || [...part.querySelectorAll("audio")].some((audio) => !audio.paused)) continue;
      const open = [...part.querySelectorAll("details")].map((details) => details.open);
      part.innerHTML = html;
      part.querySelectorAll("details").forEach((details, i) => { details.open = open[i]; });
      shown.set(id, html);
      wireSounds(part);
    }
  };

  const ask = async (path) => {
    const answer = await fetch(path, { cache: "no-store" });
    return answer.ok ? answer.text() : null;  // not ok: a file was being replaced
  };
  let version = null;
  const look = async () => {
    const now = await ask("version"), text = now !== version && await ask("./");
    if (!text) return;
    const page = new DOMParser().parseFromString(text, "text/html"), fresh = readPoints(page);
    const charts = ({ roots, data }) => [...Object.values(roots), ...Object.keys(data)].join();
    if (charts(fresh) !== charts(points)) return location.reload();  // a chart or a curve is new
    replaceParts(page);
    for (const [name, columns] of Object.entries(fresh.data)) {
      Bokeh.documents[0].get_model_by_name(name).data = columns;
    }
    version = now;
  };
  while ("live" in document.body.dataset) {
    try {
      await look();
      document.body.dataset.live = "connected";
    } catch {  // the server has ended
      document.body.dataset.live = "ended";
      document.getElementById("foot").textContent = "not live any more: ./launch.sh watch has ended";
    }
    await new Promise((later) => setTimeout(later, 2000));
  }
})();
