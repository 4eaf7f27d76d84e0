//! A model's tensors in one safetensors file, or in several that an index lists, as transformers splits large models.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::LoadError;
use super::config::optional;
use super::tensors::TensorFile;

/// The file of a model that is in one.
pub(super) const WEIGHTS: &str = "model.safetensors";

/// What lists the files of a model that is in several.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Most files of a model. All are open while it is loaded; models of a hundred times the weights of any encoder have fewer.
const SHARDS_MAX: usize = 256;

/// A `model.safetensors.index.json`.
#[derive(Debug, Deserialize)]
pub(super) struct Index {
    weight_map: WeightMap,
}

/// The file of each tensor.
#[derive(Debug)]
struct WeightMap(HashMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Unique)
    }
}

/// Reads a map and refuses a key that comes twice, of which JSON parsers otherwise keep the last.
struct Unique;

impl<'de> Visitor<'de> for Unique {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a file for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut files = HashMap::new();
        while let Some((tensor, file)) = map.next_entry::<String, String>()? {
            if let Some(other) = files.get(&tensor) {
                return Err(A::Error::custom(format!(
                    "tensor `{tensor}` is listed for {other} and for {file}"
                )));
            }
            files.insert(tensor, file);
        }
        Ok(WeightMap(files))
    }
}

impl Index {
    /// The index of a transformer's folder; `None` if the model is in one file, which is preferred where there are both.
    ///
    /// # Errors
    /// It is malformed, or lists a file that is not in its own folder.
    pub fn of_folder(folder: &Path) -> Result<Option<Self>, LoadError> {
        if folder.join(WEIGHTS).exists() {
            return Ok(None);
        }
        Self::read(&folder.join(INDEX))
    }

    /// `None` if there is no such file.
    ///
    /// # Errors
    /// As for [`of_folder`](Self::of_folder).
    pub fn read(path: &Path) -> Result<Option<Self>, LoadError> {
        let Some(index) = optional::<Self>(path)? else { return Ok(None) };
        let refuse = |reason: String| Err(LoadError::Safetensors { path: path.to_owned(), reason });
        let files = index.files();
        if let Some(file) = files.iter().find(|file| !is_file_name(file)) {
            return refuse(format!("it lists the file `{file}`, which is not a name of a file beside it"));
        }
        if !(1..=SHARDS_MAX).contains(&files.len()) {
            return refuse(format!("it lists {} files; this engine takes 1 to {SHARDS_MAX}", files.len()));
        }
        Ok(Some(index))
    }

    /// The names of the files, each once, in order.
    pub fn files(&self) -> BTreeSet<&str> {
        self.weight_map.0.values().map(String::as_str).collect()
    }
}

/// Whether it names a file in the folder that it is joined to: no path to another folder.
fn is_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let is_one = matches!(components.next(), Some(Component::Normal(part)) if part == name);
    is_one && components.next().is_none()
}

/// The tensors of a model.
pub(super) struct Tensors {
    /// The only file, or the index.
    path: PathBuf,
    files: Vec<TensorFile>,
    /// Which file each tensor is in; `None`: there is only one.
    places: Option<HashMap<String, usize>>,
}

impl Tensors {
    /// Opens the files of a transformer's folder and reads their headers.
    ///
    /// # Errors
    /// A file that is missing or malformed; a tensor that the index lists for a file and that file does not have, or that
    /// two files have.
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        let Some(index) = Index::of_folder(folder)? else {
            let path = folder.join(WEIGHTS);
            return Ok(Self { files: vec![TensorFile::open(&path)?], path, places: None });
        };
        let path = folder.join(INDEX);
        let names = index.files();
        let files = names.iter().map(|name| TensorFile::open(&folder.join(name)));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut places = HashMap::new();
        for (at, file) in files.iter().enumerate() {
            for tensor in file.names() {
                if let Some(other) = places.insert(tensor.clone(), at) {
                    let (first, second) = (files[other].path().display(), file.path().display());
                    let reason = format!("tensor `{tensor}` is in {first} and in {second}");
                    return Err(LoadError::Safetensors { path, reason });
                }
            }
        }
        for (tensor, name) in &index.weight_map.0 {
            let is_there = places.get(tensor).is_some_and(|at| files[*at].path().ends_with(name));
            if !is_there {
                return Err(LoadError::MissingTensor { path: folder.join(name), name: tensor.clone() });
            }
        }
        Ok(Self { path, files, places: Some(places) })
    }

    /// Where a missing tensor should have been: the only file, or the index.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn has(&self, name: &str) -> bool {
        self.has_exactly(&self.stored(name))
    }

    fn has_exactly(&self, name: &str) -> bool {
        match &self.places {
            None => self.files.iter().any(|file| file.has(name)),
            Some(places) => places.contains_key(name),
        }
    }

    /// A tensor's name in the files: checkpoints that came from TensorFlow have other names for norms.
    fn stored<'a>(&self, name: &'a str) -> Cow<'a, str> {
        let older = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];
        let mut older =
            older.into_iter().filter_map(|(now, then)| Some(name.strip_suffix(now)?.to_owned() + then));
        match older.next().filter(|older| !self.has_exactly(name) && self.has_exactly(older)) {
            Some(older) => Cow::Owned(older),
            None => Cow::Borrowed(name),
        }
    }

    /// As [`TensorFile::read`].
    pub fn read(&mut self, name: &str, shape: &[usize], to: &mut [f32]) -> Result<(), LoadError> {
        let name = self.stored(name);
        self.file_of(&name)?.read(&name, shape, to)
    }

    /// As [`TensorFile::read_pieces`].
    pub fn read_pieces(
        &mut self,
        name: &str,
        shape: &[usize],
        take: impl FnMut(&[f32]) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let name = self.stored(name);
        self.file_of(&name)?.read_pieces(&name, shape, take)
    }

    fn file_of(&mut self, name: &str) -> Result<&mut TensorFile, LoadError> {
        let at = self.places.as_ref().map_or(Some(0), |places| places.get(name).copied());
        let path = &self.path;
        at.and_then(|at| self.files.get_mut(at))
            .ok_or_else(|| LoadError::MissingTensor { path: path.clone(), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_files_are_taken() {
        for name in ["model-00001-of-00002.safetensors", "..safetensors", "a b"] {
            assert!(is_file_name(name), "{name}");
        }
        for name in ["", ".", "..", "../a", "a/b", "a/", "./a", "/a", "/"] {
            assert!(!is_file_name(name), "{name}");
        }
    }

    #[test]
    fn a_tensor_that_is_listed_twice_is_named() {
        let text = r#"{"metadata": {"total_size": 8}, "weight_map": {"x": "a", "y": "a", "x": "b"}}"#;
        let refused = serde_json::from_str::<Index>(text).unwrap_err().to_string();
        assert!(refused.starts_with("tensor `x` is listed for a and for b"), "{refused}");
    }
}
