// Draws the charts of a report with uPlot, from the JSON in each figure. Without this script the tables stay open.

(() => {
  "use strict";

  const HEIGHT = 230;
  const DASHES = { solid: [], dashed: [8, 4], dotted: [2, 4] };
  const UNITS = { count: writeCount, bytes: writeBytes, ms: writeDuration };
  // Steps between ticks that are round in the unit; counts have no fractions.
  const STEPS = {
    count: Array.from({ length: 48 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3)),
    bytes: Array.from({ length: 60 }, (_, n) => 2 ** n),
  };
  const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

  function digits(value) {
    return Math.abs(value) < 999.5 ? String(Number(value.toPrecision(3))) : Math.round(value).toLocaleString("en");
  }

  function scaled(value, units, last) {
    for (const [size, unit] of units) if (Math.abs(value) >= size) return `${digits(value / size)} ${unit}`;
    return last ? `${digits(value)} ${last}` : digits(value);
  }

  function writeCount(value) {
    return scaled(value, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]], "");
  }

  function writeBytes(value) {
    return scaled(value, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]], "B");
  }

  function writeDuration(value) {
    return scaled(value, [[86_400_000, "d"], [3_600_000, "h"], [60_000, "min"], [1_000, "s"]], "ms");
  }

  function writeTime(seconds) {
    const at = new Date(seconds * 1000);
    const day = `${at.getUTCDate()} ${MONTHS[at.getUTCMonth()]}`;
    return at.getUTCHours() || at.getUTCMinutes() ? `${day}, ${at.toISOString().slice(11, 16)}` : day;
  }

  function writeTick(seconds) {
    const at = new Date(seconds * 1000);
    return at.getUTCHours() || at.getUTCMinutes() ? at.toISOString().slice(11, 16) : writeTime(seconds);
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  // A single time needs a range around it: an hour on each side.
  function timeRange(_, low, high) {
    return low === high ? [low - 3600, high + 3600] : [low, high];
  }

  // A logarithmic scale has no place for 0: everything below a millisecond is drawn at one.
  function drawable(values, unit) {
    return unit === "ms" ? values.map((value) => (value === null ? null : Math.max(value, 1))) : values;
  }

  function valueScale(unit) {
    if (unit === "ms") return { distr: 3 };
    return { range: (_, low, high) => [0, Math.max(1, (high ?? 0) * 1.1)] };
  }

  function draw(figure) {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const write = UNITS[chart.unit];
    const place = figure.querySelector(".plot");
    const legend = figure.querySelector(".legend");
    const readout = figure.querySelector(".readout");
    for (const part of [place, legend, readout]) part.hidden = false;
    const width = () => Math.max(200, place.clientWidth);
    const axis = { stroke: () => colour("soft"), grid: { stroke: () => colour("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };

    function describe(index) {
      const at = index ?? chart.times.length - 1;
      const values = chart.series.map(({ name, values }) => `${name} ${values[at] === null ? "–" : write(values[at])}`);
      readout.textContent = `${writeTime(chart.times[at])} UTC: ${values.join(", ")}`;
    }

    const plot = new uPlot(
      {
        width: width(),
        height: HEIGHT,
        padding: [10, 28, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, y: false, points: { size: 7 } },
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        scales: { x: { time: true, range: timeRange }, y: valueScale(chart.unit) },
        axes: [
          { ...axis, size: 30, space: 64, values: (_, ticks) => ticks.map(writeTick) },
          { ...axis, size: 68, space: 34, incrs: STEPS[chart.unit], values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : write(tick))) },
        ],
        series: [{}, ...chart.series.map((line) => ({
          label: line.name,
          stroke: () => colour(`c${line.colour}`),
          dash: DASHES[line.dash],
          width: 2,
          spanGaps: false,
          points: { size: 6, fill: () => colour("sheet") },
        }))],
        hooks: { setCursor: [(shown) => describe(shown.cursor.idx)] },
      },
      [chart.times, ...chart.series.map((line) => drawable(line.values, chart.unit))],
      place,
    );
    describe(null);
    new ResizeObserver(() => plot.setSize({ width: width(), height: HEIGHT })).observe(place);
    figure.querySelector("details").open = false;
    return plot;
  }

  const plots = [...document.querySelectorAll("figure.chart")].map(draw);

  function repaint() {
    for (const plot of plots) plot.redraw(false);
  }

  // Paper is white, whatever the theme of the screen is.
  function print(isPrinting) {
    document.documentElement.classList.toggle("paper", isPrinting);
    repaint();
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
