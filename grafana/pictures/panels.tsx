// The panels, drawn by Grafana's own components. A state timeline is no part of @grafana/ui: its bands are drawn here, with the
// texts and colours that @grafana/data gives their values.

import {
  type DataFrame,
  type FieldDisplay,
  dateTime,
  getDisplayValueAlignmentFactors,
  getFieldDisplayName,
  getFieldDisplayValues,
  type GrafanaTheme2,
  VizOrientation,
} from '@grafana/data';
import { BarGauge, BigValue, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import type { Span } from './frames';

export interface Shown {
  panel: any;
  data: DataFrame[];
  span: Span;
  theme: GrafanaTheme2;
}

export interface Sized extends Shown {
  width: number;
  height: number;
}

const range = (span: Span) => {
  const from = dateTime(span.from * 1000);
  const to = dateTime(span.to * 1000);
  return { from, to, raw: { from, to } };
};

const displays = ({ panel, data, theme }: Shown): FieldDisplay[] =>
  getFieldDisplayValues({
    data,
    theme,
    fieldConfig: panel.fieldConfig,
    reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text: string) => text,
    timeZone: 'utc',
  });

function Lines({ panel, data, span, width, height }: Sized) {
  const { legend, tooltip } = panel.options;
  return (
    <TimeSeries
      frames={data}
      timeRange={range(span)}
      timeZone="utc"
      width={width}
      height={height}
      legend={legend}
      options={{ legend, tooltip } as any}
    />
  );
}

function Numbers(shown: Sized) {
  const { panel, theme, width, height } = shown;
  return (
    <VizRepeater
      getValues={() => displays(shown)}
      renderValue={({ value, width, height, count }) => (
        <BigValue
          theme={theme}
          value={value.display}
          width={width}
          height={height}
          count={count}
          colorMode={panel.options.colorMode}
          graphMode={panel.options.graphMode}
          justifyMode={panel.options.justifyMode}
          textMode={panel.options.textMode}
        />
      )}
      source={shown.data}
      width={width}
      height={height}
      renderCounter={1}
      itemSpacing={3}
      orientation={VizOrientation.Auto}
    />
  );
}

function Bars(shown: Sized) {
  const { panel, theme, width, height } = shown;
  return (
    <VizRepeater
      getValues={() => displays(shown)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, width, height, alignmentFactors }) => (
        <BarGauge
          theme={theme}
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex!)}
          width={width}
          height={height}
          orientation={VizOrientation.Horizontal}
          displayMode={panel.options.displayMode}
          valueDisplayMode={panel.options.valueMode}
          showUnfilled={panel.options.showUnfilled}
          alignmentFactors={alignmentFactors as any}
          namePlacement={panel.options.namePlacement}
          text={panel.options.text}
        />
      )}
      source={shown.data}
      width={width}
      height={height}
      renderCounter={1}
      itemSpacing={8}
      orientation={VizOrientation.Horizontal}
      minVizHeight={panel.options.minVizHeight}
    />
  );
}

function Rows({ panel, data, width, height }: Sized) {
  return (
    <TableNG
      data={data[0]}
      width={width}
      height={height}
      sortBy={panel.options.sortBy}
      cellHeight={panel.options.cellHeight}
      fieldConfig={panel.fieldConfig}
      noValue=""
      enableVirtualization={false}
    />
  );
}

interface Band {
  from: number;
  to: number;
  text: string;
  color: string;
}

// Equal values that follow each other are one band; where there is no value there is none.
function bands(frame: DataFrame): Band[] {
  const [times, values] = frame.fields;
  const found: Band[] = [];
  values.values.forEach((value: number | null, i: number) => {
    const { text, color } = values.display!(value);
    const [from, to] = [times.values[i], times.values[i + 1] ?? times.values[i]];
    const last = found.at(-1);
    if (value !== null && last !== undefined && last.to === from && last.text === text) {
      last.to = to;
    } else if (value !== null) {
      found.push({ from, to, text, color: color ?? '#888' });
    }
  });
  return found;
}

function Bands({ data, span, theme, width, height }: Sized) {
  const row = Math.min(32, Math.floor((height - 20) / Math.max(1, data.length)));
  const label = Math.min(300, width / 3);
  const at = (time: number) => label + ((time / 1000 - span.from) / (span.to - span.from)) * (width - label - 4);
  const clock = (time: number) => new Date(time * 1000).toISOString().slice(11, 19);
  return (
    <svg width={width} height={height} fontFamily={theme.typography.fontFamily} fontSize={12}>
      {data.map((frame, line) => (
        <g key={line} transform={`translate(0 ${line * row})`}>
          <text x={label - 6} y={row / 2 + 4} textAnchor="end" fill={theme.colors.text.primary}>
            {getFieldDisplayName(frame.fields[1], frame)}
          </text>
          {bands(frame).map(({ from, to, text, color }) => (
            <g key={from}>
              <rect x={at(from)} y={2} width={at(to) - at(from)} height={row - 4} fill={color} />
              <text x={at(from) + 5} y={row / 2 + 4} fill={theme.colors.getContrastText(color)}>
                {at(to) - at(from) > 8 * text.length ? text : ''}
              </text>
            </g>
          ))}
        </g>
      ))}
      {[span.from, (span.from + span.to) / 2, span.to].map((time, i) => (
        <text
          key={time}
          x={at(time * 1000)}
          y={height - 4}
          textAnchor={(['start', 'middle', 'end'] as const)[i]}
          fill={theme.colors.text.secondary}
        >
          {clock(time)}
        </text>
      ))}
    </svg>
  );
}

// What Grafana shows for a panel whose queries gave nothing.
function Nothing({ panel, width, height }: Sized) {
  return (
    <div className="absent" style={{ width, height, display: 'grid', placeContent: 'center', textAlign: 'center', opacity: 0.75 }}>
      {panel.fieldConfig.defaults.noValue}
    </div>
  );
}

const DRAWN: Record<string, (sized: Sized) => React.ReactNode> = {
  timeseries: Lines,
  stat: Numbers,
  bargauge: Bars,
  table: Rows,
  'state-timeline': Bands,
};

export function Drawn(sized: Sized) {
  const Panel = sized.data.some((frame) => frame.length > 0) ? DRAWN[sized.panel.type] : Nothing;
  return <Panel {...sized} />;
}
