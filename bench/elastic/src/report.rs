//! Table and chart.

use std::fmt::Write as _;

use crate::metrics::Row;

const COLOURS: [&str; 7] = ["#b0b0b0", "#7f7f7f", "#d98c5f", "#e3c06b", "#3f7fbf", "#7a5fb0", "#3a9a5b"];

/// Formats all rows as a Markdown table.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| traffic | way | served well /s | of all | exposed us a step, mean | p99 | stalled steps | refused | queued | preempted | to host | \
         TTFT ms p50 | p99 | TPOT ms p50 | p99 | pages mapped | moved twice |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let _ = writeln!(
            text,
            "| {} | {} | {:.2} | {:.3} | {:.1} | {:.0} | {} of {} | {} | {} | {} | {} | {:.0} | {:.0} | {:.1} | {:.1} | {} | {} |",
            row.trace,
            row.way,
            row.goodput,
            row.attained,
            row.exposed_mean_us,
            row.exposed_p99_us,
            row.stalled,
            row.steps,
            row.refused,
            row.queued,
            row.preempted,
            row.parked,
            row.ttft_p50_ms,
            row.ttft_p99_ms,
            row.tpot_p50_ms,
            row.tpot_p99_ms,
            row.maps,
            row.twice,
        );
    }
    text
}

fn names(rows: &[Row], of: impl Fn(&Row) -> &String) -> Vec<&String> {
    let mut names = Vec::new();
    for row in rows {
        if !names.contains(&of(row)) {
            names.push(of(row));
        }
    }
    names
}

/// Draws goodput and exposed mapping as SVG, one group of bars per traffic.
#[must_use]
pub fn picture(rows: &[Row]) -> String {
    let (traces, ways) = (names(rows, |row| &row.trace), names(rows, |row| &row.way));
    let (bar, height) = (14.0, 150.0);
    let group = bar * ways.len() as f64 + 34.0;
    let width = 60.0 + group * traces.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"480\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let panels = [
        ("requests served well, of all (simulated)", (|row| row.attained) as fn(&Row) -> f64),
        ("mapping that a step waits for, mean, us (simulated)", |row| row.exposed_mean_us),
    ];
    for (panel, (title, value)) in panels.into_iter().enumerate() {
        let base = 190.0 + 205.0 * panel as f64;
        let most = rows.iter().map(value).fold(f64::MIN_POSITIVE, f64::max);
        let _ = writeln!(
            svg,
            "<text x=\"40\" y=\"{:.0}\" font-weight=\"bold\">{title}</text>",
            base - height - 12.0
        );
        for part in [0.0, 0.5, 1.0] {
            let y = base - part * height;
            let _ = writeln!(
                svg,
                "<line x1=\"40\" x2=\"{:.0}\" y1=\"{y:.0}\" y2=\"{y:.0}\" stroke=\"#ddd\"/>",
                width - 10.0
            );
            let _ = writeln!(
                svg,
                "<text x=\"36\" y=\"{:.0}\" text-anchor=\"end\">{:.1}</text>",
                y + 4.0,
                part * most
            );
        }
        for (place, trace) in traces.iter().enumerate() {
            let left = 50.0 + group * place as f64;
            for (number, way) in ways.iter().enumerate() {
                let Some(row) = rows.iter().find(|row| row.trace == **trace && row.way == **way) else {
                    continue;
                };
                let tall = value(row) / most * height;
                let _ = writeln!(
                    svg,
                    "<rect x=\"{:.0}\" y=\"{:.1}\" width=\"{:.0}\" height=\"{tall:.1}\" fill=\"{}\"><title>{way}: {:.3}</title></rect>",
                    left + bar * number as f64,
                    base - tall,
                    bar - 2.0,
                    COLOURS[number % COLOURS.len()],
                    value(row),
                );
            }
            let _ = writeln!(svg, "<text x=\"{left:.0}\" y=\"{:.0}\">{trace}</text>", base + 14.0);
        }
    }
    for (number, way) in ways.iter().enumerate() {
        let (x, y) = (50.0 + 190.0 * (number % 3) as f64, 430.0 + 18.0 * (number / 3) as f64);
        let colour = COLOURS[number % COLOURS.len()];
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.0}\" y=\"{:.0}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>",
            y - 9.0
        );
        let _ = writeln!(svg, "<text x=\"{:.0}\" y=\"{y:.0}\">{way}</text>", x + 15.0);
    }
    svg.push_str("</svg>\n");
    svg
}
