//! Weights in several files: the same vectors and memory as with one file, and an error that names each fault.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::{Value, json};
use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_schemas::Params;

use crate::{Reference, copy_of, cpu, tiny};

const FILES: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const INDEX: &str = "model.safetensors.index.json";

/// Puts a folder's weights into two files by turns, and the index beside them.
fn split(folder: &Path) {
    let one = fs::read(folder.join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&one).unwrap();
    let mut names = all.names();
    names.sort_unstable();
    let mut places = BTreeMap::new();
    for (turn, file) in FILES.into_iter().enumerate() {
        let own: Vec<&str> = names.iter().copied().skip(turn).step_by(2).collect();
        let tensors = own.iter().map(|name| (*name, all.tensor(name).unwrap()));
        safetensors::serialize_to_file(tensors, None, &folder.join(file)).unwrap();
        places.extend(own.iter().map(|name| ((*name).to_owned(), file)));
    }
    let index = json!({"metadata": {"total_size": one.len()}, "weight_map": places});
    fs::write(folder.join(INDEX), index.to_string()).unwrap();
    fs::remove_file(folder.join("model.safetensors")).unwrap();
}

fn load(folder: &Path) -> Encoder {
    Encoder::load_f32(&Source::Folder(folder.into()), cpu(2)).unwrap()
}

#[test]
fn weights_in_two_files_are_those_in_one() {
    let reference = Reference::read("tiny-mean");
    let outputs = |encoder: &Encoder| {
        let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
        encoder.run(&items).unwrap()
    };
    let one = Encoder::load_f32(&tiny("tiny-mean"), cpu(2)).unwrap();
    let folder = copy_of("tiny-mean");
    split(folder.path());
    let two = load(folder.path());
    assert_eq!(outputs(&two), outputs(&one));
    assert_eq!(two.resident_bytes(), one.resident_bytes());
    // Another byte in either file or in the index is another revision.
    let revision = two.revision().unwrap();
    assert_ne!(Some(&revision), one.revision().as_ref());
    let mut revisions = vec![revision];
    let second = folder.path().join(FILES[1]);
    let mut bytes = fs::read(&second).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(second, bytes).unwrap();
    revisions.push(load(folder.path()).revision().unwrap());
    change_index(folder.path(), |index| index["metadata"]["total_size"] = 0.into());
    revisions.push(load(folder.path()).revision().unwrap());
    revisions.sort();
    revisions.dedup();
    assert_eq!(revisions.len(), 3);
}

fn change_index(folder: &Path, change: impl Fn(&mut Value)) {
    let path = folder.join(INDEX);
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut index);
    fs::write(path, index.to_string()).unwrap();
}

/// What spoils a folder, and the words of the error.
type Case<'a> = (&'a dyn Fn(&Path), &'a [&'a str]);

#[test]
fn faults_of_an_index_are_named() {
    const WORDS: &str = "embeddings.word_embeddings.weight";
    let list = |folder: &Path, tensor: &str, file: &str| {
        change_index(folder, |index| index["weight_map"][tensor] = file.into());
    };
    let cases: [Case<'_>; 9] = [
        (&|folder| list(folder, WORDS, "../x"), &["lists the file `../x`", "not a name of a file beside it"]),
        (&|folder| list(folder, WORDS, "/etc/x"), &["lists the file `/etc/x`"]),
        (&|folder| fs::remove_file(folder.join(FILES[1])).unwrap(), &["read ", FILES[1]]),
        (
            &|folder| list(folder, WORDS, FILES[1]),
            &[FILES[1], "has no tensor `embeddings.word_embeddings.weight`"],
        ),
        (&|folder| list(folder, "more.weight", FILES[1]), &[FILES[1], "has no tensor `more.weight`"]),
        (
            &|folder| fs::copy(folder.join(FILES[0]), folder.join(FILES[1])).map(drop).unwrap(),
            &["tensor `", "` is in ", FILES[0], FILES[1]],
        ),
        (
            &|folder| {
                change_index(folder, |index| {
                    index["weight_map"] =
                        (0..257).map(|n| (format!("x{n}"), json!(format!("y{n}")))).collect();
                });
            },
            &["it lists 257 files; this engine takes 1 to 256"],
        ),
        (&|folder| change_index(folder, |index| index["weight_map"] = json!({})), &["it lists 0 files"]),
        (&|folder| fs::write(folder.join(INDEX), "{").unwrap(), &["parse ", INDEX]),
    ];
    for (spoil, expected) in cases {
        let folder = copy_of("tiny-mean");
        split(folder.path());
        load(folder.path());
        spoil(folder.path());
        let error = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
        for words in expected {
            assert!(error.contains(words), "{error}, not {words}");
        }
    }
}

/// A tensor that `config.json` asks for and no file has is named with the index, which would have listed it.
#[test]
fn a_tensor_that_no_file_has_is_named() {
    let folder = copy_of("tiny-mean");
    split(folder.path());
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(config, text.replace(r#""num_hidden_layers": 2"#, r#""num_hidden_layers": 3"#)).unwrap();
    let error = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
    assert!(error.contains("index.json has no tensor `encoder.layer.2."), "{error}");
}
