//! Embeddings and residuals, with the norm of each row.

use super::fault::Report;
use super::harness::{Element, Results, Text, is_close, numbers, on_texts};

const EPS: f32 = 1e-5;

/// Threads of a block: a chunk each, in whole warps.
fn threads(element: Element, hidden: usize) -> usize {
    hidden.div_ceil(element.chunk()).next_multiple_of(32)
}

/// Rows of a fixture, of MiniLM, of odd widths, and of the largest width.
const WIDTHS: [usize; 7] = [1, 32, 36, 37, 384, 1023, 4096];

/// Layer norm of the rows of `x`, or the norm by root mean square.
fn reference(x: &[f64], hidden: usize, weight: &[f32], bias: &[f32], of_squares: bool) -> Vec<f64> {
    let mut to = Vec::with_capacity(x.len());
    for row in x.chunks(hidden) {
        let mean = if of_squares { 0.0 } else { row.iter().sum::<f64>() / hidden as f64 };
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / hidden as f64;
        let scale = 1.0 / (variance + f64::from(EPS)).sqrt();
        let scaled = row.iter().zip(weight).zip(bias);
        to.extend(
            scaled.map(|((x, weight), bias)| (x - mean) * scale * f64::from(*weight) + f64::from(*bias)),
        );
    }
    to
}

fn close(text: &Text, what: &str, got: &[f64], want: &[f64]) {
    is_close(got, want, text.element.bounds().once)
        .unwrap_or_else(|wrong| panic!("{} {what}: {wrong}", text.file));
}

/// `add_norm`: into `x`, or into `add` with the sum left in `x`.
pub fn add_norm(
    text: &Text,
    rows: usize,
    hidden: usize,
    of_squares: bool,
    to: &'static str,
) -> Result<Results, Report> {
    let [x, add] = [6, 7].map(|seed| numbers(text.element, seed, rows * hidden));
    let [weight, bias] = [8, 9].map(|seed| numbers(Element::F32, seed, hidden));
    let launch = text.launch("add_norm").in_place("x", &x).in_place("add", &add).again(to);
    let launch = launch.floats("weight", &weight).floats("bias", &bias).float(EPS);
    let launch = launch.flag(of_squares).number(hidden).flag(hidden.is_multiple_of(text.element.chunk()));
    let results = launch.run((rows, 1), threads(text.element, hidden))?;
    let sum: Vec<f64> = x.iter().zip(&add).map(|(x, add)| f64::from(*x) + f64::from(*add)).collect();
    let what = format!("add_norm of {rows} x {hidden} to {to}");
    close(text, &what, &results.elements(to), &reference(&sum, hidden, &weight, &bias, of_squares));
    if to == "add" {
        close(text, &what, &results.elements("x"), &sum);
    }
    Ok(results)
}

fn residuals(text: &Text) {
    for hidden in WIDTHS {
        for to in ["x", "add"] {
            for of_squares in [false, true] {
                add_norm(text, 2, hidden, of_squares, to).unwrap();
            }
        }
    }
}
on_texts!(residuals);

/// A norm alone: of the sum of a row and itself, all three matrices one.
fn norms_alone(text: &Text) {
    for hidden in WIDTHS {
        let x = numbers(text.element, 21, 2 * hidden);
        let [weight, bias] = [22, 23].map(|seed| numbers(Element::F32, seed, hidden));
        let launch = text.launch("add_norm").in_place("x", &x).again("x").again("x");
        let launch = launch.floats("weight", &weight).floats("bias", &bias).float(EPS);
        let launch = launch.flag(true).number(hidden).flag(hidden.is_multiple_of(text.element.chunk()));
        let results = launch.run((2, 1), threads(text.element, hidden)).unwrap();
        let sum: Vec<f64> = x.iter().map(|x| 2.0 * f64::from(*x)).collect();
        let want = reference(&sum, hidden, &weight, &bias, true);
        close(text, &format!("norm of {hidden}"), &results.elements("x"), &want);
    }
}
on_texts!(norms_alone);

fn embeddings(text: &Text) {
    for hidden in WIDTHS {
        for keeps_sum in [false, true] {
            embed(text, hidden, keeps_sum).unwrap();
        }
    }
}
on_texts!(embeddings);

/// Embeds three tokens, and compares.
///
/// # Errors
/// What the kernel did wrong.
pub fn embed(text: &Text, hidden: usize, keeps_sum: bool) -> Result<(), Report> {
    let element = text.element;
    let (ids, rows) = ([4_u32, 0, 4], [1_u32, 2, 0]);
    let [words, positions] = [(10, 5), (11, 3)].map(|(seed, rows)| numbers(element, seed, rows * hidden));
    let [weight, bias] = [12, 13].map(|seed| numbers(Element::F32, seed, hidden));
    let launch = text.launch("embed").words("ids", &ids).words("rows", &rows).elements("words", &words);
    let launch =
        launch.elements("positions", &positions).floats("weight", &weight).floats("bias", &bias).float(EPS);
    let launch = launch.flag(false).number(hidden).flag(hidden.is_multiple_of(element.chunk()));
    let launch = launch.output("sum", ids.len() * hidden);
    let launch = if keeps_sum { launch.output("to", ids.len() * hidden) } else { launch.again("sum") };
    let results = launch.run((ids.len(), 1), threads(element, hidden))?;
    let row = |table: &[f32], row: u32| table[row as usize * hidden..][..hidden].to_vec();
    let sum: Vec<f64> = ids
        .iter()
        .zip(rows)
        .flat_map(|(id, position)| row(&words, *id).into_iter().zip(row(&positions, position)))
        .map(|(word, position)| f64::from(word) + f64::from(position))
        .collect();
    let normed = reference(&sum, hidden, &weight, &bias, false);
    let what = format!("embeddings of {hidden}");
    if keeps_sum {
        close(text, &what, &results.elements("sum"), &sum);
        close(text, &what, &results.elements("to"), &normed);
    } else {
        close(text, &what, &results.elements("sum"), &normed);
    }
    Ok(())
}
