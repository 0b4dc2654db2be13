// Draws one dashboard from `data.json`: the dashboard's JSON, what its variables are, and Prometheus's answer to each of its queries.

import {
  applyFieldOverrides,
  cacheFieldDisplayNames,
  createTheme,
  type DataFrame,
  type FieldConfigPropertyItem,
  Registry,
  standardTransformers,
  standardTransformersRegistry,
  ThemeContext,
  type TransformerRegistryItem,
  transformDataFrame,
} from '@grafana/data';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import { firstValueFrom } from 'rxjs';
import { frames, type Series, type Span } from './frames';
import { Drawn, type Shown } from './panels';

interface Given {
  dashboard: any;
  variables: Record<string, string>;
  span: Span;
  results: Record<string, Series[]>;
}

const COLUMN = 62;
const ROW = 38;
const GAP = 8;
const HEAD = 92;

const STANDARD = ['unit', 'min', 'max', 'decimals', 'displayName', 'color', 'noValue', 'mappings', 'thresholds', 'links'];
const CUSTOM = [
  ...['lineWidth', 'fillOpacity', 'showPoints', 'drawStyle', 'lineInterpolation', 'spanNulls', 'axisPlacement', 'pointSize'],
  ...['cellOptions', 'wrapText', 'width', 'align', 'filterable', 'inspect', 'hideFrom'],
];

const property = (id: string, isCustom: boolean): FieldConfigPropertyItem =>
  ({
    id: isCustom ? `custom.${id}` : id,
    path: id,
    isCustom,
    name: id,
    process: (value: unknown) => value,
    shouldApply: () => true,
    settings: {},
  }) as unknown as FieldConfigPropertyItem;

const registry = new Registry<FieldConfigPropertyItem>(() => [
  ...STANDARD.map((id) => property(id, false)),
  ...CUSTOM.map((id) => property(id, true)),
]);

// Some have two names there.
const transformers = new Map(Object.values(standardTransformers).map((one) => [one.id, one]));
standardTransformersRegistry.setInit(() =>
  [...transformers.values()].map(
    (one) => ({ id: one.id, name: one.name, transformation: async () => one }) as unknown as TransformerRegistryItem
  )
);

const theme = createTheme({ colors: { mode: 'dark' } });

async function shown(panel: any, given: Given): Promise<Shown> {
  const alone = panel.targets.length === 1;
  const found = panel.targets.flatMap((target: any) =>
    frames(given.results[`${panel.id}${target.refId}`], target, alone, given.span)
  );
  const transformed: DataFrame[] = await firstValueFrom(transformDataFrame(panel.transformations ?? [], found));
  const data = applyFieldOverrides({
    data: transformed,
    fieldConfig: panel.fieldConfig,
    replaceVariables: (text) => text,
    theme,
    timeZone: 'utc',
    fieldConfigRegistry: registry,
  });
  cacheFieldDisplayNames(data);
  return { panel, data, span: given.span, theme };
}

function place({ x, y, w, h }: { x: number; y: number; w: number; h: number }): React.CSSProperties {
  return { position: 'absolute', left: x * COLUMN, top: HEAD + y * ROW, width: w * COLUMN - GAP, height: h * ROW - GAP };
}

function Head({ given }: { given: Given }) {
  const chosen = Object.entries(given.variables).map(([name, value]) => `${name}: ${value}`);
  return (
    <div style={{ padding: '10px 6px' }}>
      <h2 style={{ margin: 0 }}>{given.dashboard.title}</h2>
      <p style={{ margin: '4px 0', color: theme.colors.text.secondary }}>{given.dashboard.description}</p>
      <p style={{ margin: 0, color: theme.colors.text.link }}>{chosen.join(' · ')}</p>
    </div>
  );
}

function Page({ given, panels }: { given: Given; panels: Shown[] }) {
  const rows = given.dashboard.panels.filter((panel: any) => panel.type === 'row');
  const bottom = Math.max(...panels.map(({ panel }) => panel.gridPos.y + panel.gridPos.h));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div id="page" style={{ position: 'relative', width: 24 * COLUMN, height: HEAD + bottom * ROW, background: theme.colors.background.canvas }}>
        <Head given={given} />
        {rows.map((row: any) => (
          <h4 key={row.id} style={{ ...place(row.gridPos), margin: 0 }}>
            {row.title}
          </h4>
        ))}
        {panels.map((one) => (
          <div key={one.panel.id} className="panel" data-title={one.panel.title} style={place(one.panel.gridPos)}>
            <PanelChrome
              title={one.panel.title}
              width={one.panel.gridPos.w * COLUMN - GAP}
              height={one.panel.gridPos.h * ROW - GAP}
            >
              {(width, height) => <Drawn {...one} width={width} height={height} />}
            </PanelChrome>
          </div>
        ))}
      </div>
    </ThemeContext.Provider>
  );
}

const failed = (message: string) => document.body.insertAdjacentText('beforeend', `FAILED: ${message}`);
window.addEventListener('error', (event) => failed(event.message));
window.addEventListener('unhandledrejection', (event) => failed(String(event.reason?.stack ?? event.reason)));

const given: Given = await (await fetch('./data.json')).json();
const wanted = given.dashboard.panels.filter((panel: any) => panel.type !== 'row');
const panels = await Promise.all(wanted.map((panel: any) => shown(panel, given)));
createRoot(document.getElementById('root')!).render(<Page given={given} panels={panels} />);
