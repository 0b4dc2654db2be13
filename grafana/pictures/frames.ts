// Prometheus's answers as the data frames that Grafana's own data source makes of them.

import { type DataFrame, type Field, FieldType, toDataFrame } from '@grafana/data';

export interface Series {
  metric: Record<string, string>;
  value?: [number, string];
  values?: Array<[number, string]>;
}

export interface Target {
  refId: string;
  legendFormat?: string;
  format?: string;
}

export interface Span {
  from: number;
  to: number;
  step: number;
}

const legend = (format: string | undefined, labels: Record<string, string>): string =>
  format && format !== '__auto'
    ? format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name: string) => labels[name] ?? '').replace(/\s+/g, ' ')
    : JSON.stringify(labels);

// What was not scraped is null at its time, so that lines end and bands have holes.
function overTime(series: Series, target: Target, span: Span): DataFrame {
  const values = new Map(series.values!.map(([time, value]) => [time, Number(value)]));
  const times = Array.from({ length: Math.floor((span.to - span.from) / span.step) + 1 }, (_, i) => span.from + i * span.step);
  return named(series, target, times.map((time) => time * 1000), times.map((time) => values.get(time) ?? null));
}

function named(series: Series, target: Target, times: number[], values: Array<number | null>): DataFrame {
  const config = { displayNameFromDS: legend(target.legendFormat, series.metric) };
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: times },
      { name: 'Value', type: FieldType.number, values, labels: series.metric, config },
    ],
  });
}

// One frame a query: a column for each label, and the value last, which bears the query's letter beside other queries.
function table(results: Series[], target: Target, alone: boolean): DataFrame {
  const labels = [...new Set(results.flatMap((series) => Object.keys(series.metric)))].sort();
  const columns: Array<Partial<Field>> = labels.map((name) => ({
    name,
    type: FieldType.string,
    values: results.map((series) => series.metric[name] ?? ''),
  }));
  const value = { name: alone ? 'Value' : `Value #${target.refId}`, type: FieldType.number, values: results.map((series) => Number(series.value![1])) };
  const time = { name: 'Time', type: FieldType.time, values: results.map((series) => series.value![0] * 1000) };
  return toDataFrame({ refId: target.refId, fields: [time, ...columns, value] as Field[] });
}

export function frames(results: Series[], target: Target, alone: boolean, span: Span): DataFrame[] {
  if (results.length === 0) {
    return [];
  }
  if (target.format === 'table') {
    return [table(results, target, alone)];
  }
  return results.map((series) =>
    series.values
      ? overTime(series, target, span)
      : named(series, target, [series.value![0] * 1000], [Number(series.value![1])])
  );
}
