// The numbers of the last minutes, by column.

export class Store {
  start(history) {
    this.columns = history.columns;
    this.values = history.values;
    this.kept = history.kept;
    this.every = history.every_s * 1000;
    this.server = history.server;
    this.at = new Map(this.columns.map((name, i) => [name, i]));
  }

  add(numbers) {
    if (numbers[0] <= this.last("time")) return;
    this.values.forEach((column, i) => {
      column.push(numbers[i]);
      if (column.length > this.kept) column.shift();
    });
  }

  column(name) {
    return this.values[this.at.get(name)] ?? [];
  }

  last(name) {
    return this.column(name).at(-1) ?? 0;
  }

  /** Indices of the samples of the last `seconds`, as [first, end). */
  span(seconds) {
    const time = this.column("time"),
      from = this.last("time") - seconds * 1000;
    let first = time.length;
    while (first > 0 && time[first - 1] >= from) first--;
    return [first, time.length];
  }

  /** The window that the pictures show: no longer than there is a past. */
  shown(seconds) {
    const past = (this.last("time") - (this.column("time")[0] ?? 0)) / 1000;
    return Math.min(seconds, Math.max(30, 10 * Math.ceil(past / 10)));
  }

  /** A gauge over the last `seconds`: values. */
  gauge(name, seconds) {
    return this.column(name).slice(...this.span(seconds));
  }

  /** When the samples were taken, and between which two of them nobody looked. */
  times(seconds) {
    return this.column("time").slice(...this.span(seconds));
  }

  /** A counter's growth a second, over the last `seconds`; null where nobody looked. */
  rate(name, seconds) {
    const [first, end] = this.span(seconds),
      column = this.column(name),
      time = this.column("time");
    const found = [];
    for (let i = first; i < end; i++) {
      const took = i > 0 ? time[i] - time[i - 1] : 0;
      const seen = took > 0 && took < 5 * this.every;
      found.push(seen ? (Math.max(0, column[i] - column[i - 1]) * 1000) / took : null);
    }
    return found;
  }

  /** The rate over the last few samples, for a figure that can be read. */
  now(name, samples = 3) {
    const column = this.column(name),
      time = this.column("time"),
      end = column.length - 1;
    const start = Math.max(0, end - samples);
    const took = end > start ? time[end] - time[start] : 0;
    return took > 0 && took < 5 * samples * this.every ? (Math.max(0, column[end] - column[start]) * 1000) / took : 0;
  }
}
