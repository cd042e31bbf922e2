// Numbers as people read them.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 1,234; from 10,000 on, 12.3K. */
export const count = (value) => (value < 10000 ? plain : short).format(value);

/** 3.4; from 10 on, whole numbers. */
export const rate = (value) => (value > 0 && value < 9.95 ? value.toFixed(1) : count(value));

/** Rounded, but a share below 1 is at most 99 %. */
export const percent = (share) =>
  `${share < 1 ? Math.min(99, Math.round(share * 100)) : 100} %`;

export const seconds = (value) =>
  value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 0)} s`;

/** 42 s, 3 min, 2 h 05 min, 3 d 4 h. */
export function duration(value) {
  const minutes = Math.floor(value / 60);
  const hours = Math.floor(minutes / 60);
  if (value < 60) return `${Math.floor(value)} s`;
  if (hours < 1) return `${minutes} min`;
  if (hours < 24) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
