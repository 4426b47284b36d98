// Numbers, scales and ticks

const isNumber = (value) => typeof value === "number";
const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

function format(value, digits = 3) {
  if (value === "inf" || value === "-inf") return value === "inf" ? "∞" : "−∞";
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e4) {
    const [front, power] = value.toExponential(digits - 1).split("e");
    const raised = [...String(Number(power))].map((letter) => RAISED[letter]).join("");
    const short = digits === 1 && Math.abs(Number(front)) === 1 ? front.replace("1", "") : front + "×";
    return `${short}10${raised}`.replace("-", "−");
  }
  const text = size >= 1000 ? String(Number(value.toPrecision(digits))) : value.toPrecision(digits);
  return text.replace("-", "−");
}
function tickText(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e4)) return format(value, 1);
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

// An axis: a map of its values to the unit interval, its ticks, and whether it is logarithmic
function axisOf(kind, values, floor, least) {
  const known = values.filter((value) => isNumber(value) && (kind !== "log" || value > 0));
  let low = Infinity, high = -Infinity;
  for (const value of known) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) [low, high] = kind === "log" ? [0.1, 1] : [0, 1];
  if (kind === "log") return logAxis(low, high);
  if (kind === "both") return bothAxis(low, high, known);
  return linearAxis(low, high, floor, least);
}
function linearAxis(low, high, floor, least) {
  if (floor !== undefined) { low = Math.min(floor, low); high = Math.max(high, least || 0); }
  if (low === high) { low -= Math.abs(low) / 2 || 0.5; high += Math.abs(high) / 2 || 0.5; }
  const room = (high - low) * 0.05, end = high + room, start = low === floor ? low : low - room;
  return { at: (value) => (value - start) / (end - start), ticks: linearTicks(start, end) };
}
function linearTicks(low, high) {
  const roughly = (high - low) / 5, unit = Math.pow(10, Math.floor(Math.log10(roughly)));
  const step = [1, 2, 5, 10].find((factor) => factor * unit >= roughly * 0.999) * unit;
  const found = [];
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high + step * 1e-9; count++)
    found.push(Number((count * step).toPrecision(10)));
  return found;
}
function logAxis(low, high) {
  if (low === high) { low /= 2; high *= 2; }
  const room = (Math.log10(high) - Math.log10(low)) * 0.05;
  const start = Math.log10(low) - room, end = Math.log10(high) + room;
  return { at: (value) => (Math.log10(value) - start) / (end - start), ticks: logTicks(start, end), log: true };
}
function logTicks(start, end) {
  const decades = end - start, every = Math.max(1, Math.ceil(decades / 6)), found = [];
  const steps = decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 2.5 ? [1, 2, 5] : [1];
  for (let power = Math.floor(start); power <= end; power++)
    for (const step of steps) {
      const value = step * Math.pow(10, power), place = Math.log10(value);
      if (place >= start && place <= end && power % every === 0) found.push(Number(value.toPrecision(1)));
    }
  return found;
}
// logarithmic to both sides of zero, linear within the usual size
function bothAxis(low, high, known) {
  const sizes = known.map(Math.abs).filter((size) => size > 0).sort((a, b) => a - b);
  const usual = Math.pow(10, Math.round(Math.log10(sizes[Math.floor(sizes.length / 2)] || 1)));
  const map = (value) => Math.asinh(value / usual / 2);
  const [first, last] = [map(low), map(high)], room = (last - first || 1) * 0.05;
  const start = first - room, end = last + room, ticks = [0];
  const every = Math.max(1, Math.ceil((end - start) / 2.3 / 6));
  for (let power = 0; map(usual * Math.pow(10, power)) <= Math.max(-start, end); power += every)
    ticks.push(usual * Math.pow(10, power), -usual * Math.pow(10, power));
  const at = (value) => (map(value) - start) / (end - start);
  return { at, ticks: ticks.filter((value) => at(value) >= 0 && at(value) <= 1) };
}
