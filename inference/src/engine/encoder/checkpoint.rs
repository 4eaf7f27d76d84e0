//! Finds a model's tensors by their purpose, and joins those that a checkpoint stores in parts. The same for every device.

use std::hash::{DefaultHasher, Hasher as _};

use super::LoadError;
use super::config::{Dims, ModelConfig};
use super::families::{Design, MlmHead, Names, Positions, Spec};
use super::forward::{Linear, Norm};
use super::shards::Tensors;

/// A model's files of weights, with its family's names.
pub(super) struct Checkpoint {
    tensors: Tensors,
    names: &'static Names,
    /// What the names of all tensors but those of a task's head begin with.
    prefix: &'static str,
    layers: usize,
}

impl Checkpoint {
    /// Opens the model's files and reads their headers.
    ///
    /// # Errors
    /// As for [`Tensors::open`].
    pub fn open(config: &ModelConfig) -> Result<Self, LoadError> {
        let tensors = Tensors::open(&config.transformer)?;
        let names = config.spec.names;
        let is_there = |prefix: &&&str| tensors.has(&format!("{prefix}{}.weight", names.words));
        let prefix = names.prefixes.iter().find(is_there).copied().unwrap_or_default();
        let mut checkpoint = Self { tensors, names, prefix, layers: config.spec.dims.layers };
        checkpoint.check_biases(&config.spec.design)?;
        if let Some(head) = config.spec.mlm {
            checkpoint.check_decoder(head, &config.spec)?;
        }
        Ok(checkpoint)
    }

    /// Refuses a file whose map to the vocabulary has other weights than the words' embeddings: transformers would compute with them.
    fn check_decoder(&mut self, head: &MlmHead, spec: &Spec) -> Result<(), LoadError> {
        let name = head.decoder;
        if !self.tensors.has(name) {
            return Ok(());
        }
        let shape = [spec.dims.vocabulary, spec.dims.hidden];
        let words = self.of_model(&self.words());
        let mut sums = [DefaultHasher::new(), DefaultHasher::new()];
        for (tensor, sum) in [&*words, name].into_iter().zip(&mut sums) {
            self.tensors.read_pieces(tensor, &shape, |piece| {
                // There are two zeros.
                piece.iter().for_each(|x| sum.write_u32((x + 0.0).to_bits()));
                Ok(())
            })?;
        }
        match sums.map(|sum| sum.finish()) {
            [words, decoder] if words == decoder => Ok(()),
            _ => Err(LoadError::Unsupported {
                path: self.tensors.path().to_owned(),
                found: format!("the tensor `{name}`, which differs from the words' embeddings"),
                takes: "sparse vectors of models whose last map has the weights of the words' embeddings"
                    .to_owned(),
            }),
        }
    }

    /// Refuses a file with a bias that `config.json` does not mention.
    fn check_biases(&self, design: &Design) -> Result<(), LoadError> {
        let linears = self.names.linears.iter().filter(|(which, _)| !design.has_bias(*which));
        let norms = self.names.norms.iter().filter(|_| !design.norm_bias).map(|(_, part)| part);
        let parts: Vec<_> = linears.flat_map(|(_, parts)| *parts).chain(norms).collect();
        for layer in 0..self.layers {
            for part in &parts {
                let name = format!("{}.bias", self.of_model(&self.of_layer(layer, part)));
                if self.tensors.has(&name) {
                    return Err(self.unmentioned_bias(&name));
                }
            }
        }
        Ok(())
    }

    pub fn names(&self) -> &'static Names {
        self.names
    }

    /// Reads a tensor of exactly this shape as f32 into `to`, which has as many elements.
    pub fn read(&mut self, name: &str, shape: &[usize], to: &mut [f32]) -> Result<(), LoadError> {
        self.tensors.read(&self.of_model(name), shape, to)
    }

    /// The same for who takes it on in pieces: `take` gets one after the other.
    pub fn read_pieces(
        &mut self,
        name: &str,
        shape: &[usize],
        take: impl FnMut(&[f32]) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        self.tensors.read_pieces(&self.of_model(name), shape, take)
    }

    /// The whole name of a tensor of the model, or of its first part.
    pub fn of_model(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The error for a bias that `config.json` does not mention: computing without it would silently give other outputs.
    pub fn unmentioned_bias(&self, name: &str) -> LoadError {
        LoadError::Unsupported {
            path: self.tensors.path().to_owned(),
            found: format!("the tensor `{name}`"),
            takes: "such a map or norm without a bias, as config.json describes it".to_owned(),
        }
    }

    /// Reads a tensor by its whole name: those of a task's head have no prefix.
    pub fn read_head(&mut self, name: &str, shape: &[usize], to: &mut [f32]) -> Result<(), LoadError> {
        self.tensors.read(name, shape, to)
    }

    /// Whether there is such a tensor of a task's head.
    pub fn has_head(&self, name: &str) -> bool {
        self.tensors.has(name)
    }

    /// Reads the word embeddings, times what the model multiplies them with: `take` gets one piece after the other.
    ///
    /// # Errors
    /// The tensor is missing, or of another shape or type; or `take` failed.
    pub fn read_words(
        &mut self,
        spec: &Spec,
        mut take: impl FnMut(&[f32]) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let (name, shape) = (self.words(), [spec.dims.vocabulary, spec.dims.hidden]);
        if spec.words_scale == 1.0 {
            return self.read_pieces(&name, &shape, take);
        }
        let mut scaled = Vec::new();
        self.read_pieces(&name, &shape, |piece| {
            scaled.clear();
            scaled.extend(piece.iter().map(|x| x * spec.words_scale));
            take(&scaled)
        })
    }

    /// The word embeddings' name.
    pub fn words(&self) -> String {
        format!("{}.weight", self.names.words)
    }

    /// Reads what a norm multiplies with into `to`, times `scale`. `name` is without `.weight`.
    ///
    /// # Errors
    /// The tensor is missing, or of another shape or type.
    pub fn read_norm(
        &mut self,
        design: &Design,
        name: &str,
        scale: f32,
        to: &mut [f32],
    ) -> Result<(), LoadError> {
        self.read(&format!("{name}.weight"), &[to.len()], to)?;
        let more = if design.norm_plus_one { 1.0 } else { 0.0 };
        to.iter_mut().for_each(|weight| *weight = (*weight + more) * scale);
        Ok(())
    }

    /// The names of the norms of a layer's query heads and key heads, and the factor of each; empty if the model has none.
    pub fn head_norms(&self, design: &Design, layer: usize) -> Vec<(String, f32)> {
        let scales = [design.query_scale, 1.0];
        let names = self.names.head_norms.iter().flatten();
        names.zip(scales).map(|(part, scale)| (self.of_layer(layer, part), scale)).collect()
    }

    /// A part of a layer, without `.weight` or `.bias`.
    pub fn of_layer(&self, layer: usize, part: &str) -> String {
        format!("{}.{layer}.{part}", self.names.layers)
    }

    /// A norm of a layer, without `.weight` or `.bias`. Where norms come before blocks, the one behind a layer's
    /// feed-forward is the first of the next layer, or the last of all.
    pub fn norm_of(&self, layer: usize, which: Norm, part: &str) -> String {
        match (self.names.last_norm, which) {
            (Some(last), Norm::Output) if layer + 1 == self.layers => last.to_owned(),
            (Some(_), Norm::Output) => self.of_layer(layer + 1, part),
            _ => self.of_layer(layer, part),
        }
    }

    /// Rows of each of the `parts` maps of the checkpoint that make up a joined linear map.
    pub fn rows_of_parts(dims: &Dims, which: Linear, columns: usize, parts: usize) -> Vec<usize> {
        match (which, parts) {
            (Linear::Qkv, 3) => vec![dims.attention_columns(), dims.kv_columns(), dims.kv_columns()],
            _ => vec![columns / parts; parts],
        }
    }

    /// The table that is added to the words' embeddings, with [`Spec::table_rows`] rows: for each token type one row per position.
    /// Each row includes the embedding of its token type.
    ///
    /// # Errors
    /// A tensor that is missing, or of another shape or type.
    pub fn position_table(&mut self, spec: &Spec) -> Result<Vec<f32>, LoadError> {
        let Dims { hidden, positions, token_types, .. } = spec.dims;
        let (first, rows) = (spec.positions.first_row(), spec.positions.rows(positions));
        let mut all = vec![0.0; (first + rows) * hidden];
        if spec.positions != Positions::Rotary {
            self.read(&format!("{}.weight", self.names.positions), &[first + rows, hidden], &mut all)?;
        }
        let mut table = all[first * hidden..].repeat(spec.segments());
        let Some(name) = self.names.token_types.filter(|_| token_types > 0) else { return Ok(table) };
        let mut types = vec![0.0; token_types * hidden];
        self.read(&format!("{name}.weight"), &[token_types, hidden], &mut types)?;
        for (segment, of_type) in table.chunks_exact_mut(rows * hidden).zip(types.chunks_exact(hidden)) {
            for row in segment.chunks_exact_mut(hidden) {
                row.iter_mut().zip(of_type).for_each(|(position, of_type)| *position += of_type);
            }
        }
        Ok(table)
    }

    /// What is added to attention's scores before they are divided by √(elements of a head): for each head a row of
    /// [`Spec::distances`] numbers, the middle one for a token and itself.
    ///
    /// # Errors
    /// A tensor that is missing, or of another shape or type.
    pub fn relative_table(&mut self, spec: &Spec) -> Result<Vec<f32>, LoadError> {
        let Some(bias) = spec.relative else { return Ok(Vec::new()) };
        let heads = spec.dims.heads;
        let mut by_bucket = vec![0.0; bias.buckets * heads];
        self.read(&format!("{}.weight", self.names.relative), &[bias.buckets, heads], &mut by_bucket)?;
        let undivided = (spec.dims.head as f32).sqrt();
        let middle = spec.dims.positions as isize - 1;
        let buckets: Vec<usize> = (-middle..=middle).map(|distance| bias.bucket(distance)).collect();
        let of_head = |head| buckets.iter().map(move |bucket| (bucket, head));
        let table = (0..heads).flat_map(of_head);
        Ok(table.map(|(bucket, head)| by_bucket[bucket * heads + head] * undivided).collect())
    }
}
