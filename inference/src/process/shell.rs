//! Finds scripts of shells in the commands of one-shot programs, because a job's parameters must be no part of them.

use std::path::Path;

use super::template::Template;

/// Programs that run one of their arguments as a script.
const SHELLS: [&str; 6] = ["sh", "bash", "dash", "zsh", "ash", "ksh"];

/// A fault, if a job's parameters would be a part of a shell's script (`sh -c SCRIPT`): the shell would run commands in them.
pub(super) fn script_of_jobs(command: &[String]) -> Option<String> {
    let is_shell = |argument: &str| {
        let name = Path::new(argument).file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| SHELLS.contains(&name))
    };
    // Another program, such as `env` or `timeout`, may start the shell. What stands behind the script are the script's own arguments.
    let mut shells = command.iter().enumerate().filter(|(_, argument)| is_shell(argument));
    let script = shells.find_map(|(at, _)| script(&command[at + 1..]))?;
    if !Template::parse(script).is_ok_and(|template| template.has_params()) {
        return None;
    }
    Some(format!(
        "gives a shell the script {script:?} with parameters of jobs in it, so jobs could run any command: pass them as arguments, as in \
         [\"/bin/sh\", \"-c\", \"… \\\"$1\\\" …\", \"sh\", \"{{params.NAME}}\"]"
    ))
}

/// The script among a shell's arguments: behind its options, if one of them is `-c`, also together with others as in `-ec`.
fn script(arguments: &[String]) -> Option<&String> {
    let mut arguments = arguments.iter();
    let mut has_script = false;
    loop {
        let argument = arguments.next()?;
        let is_long = argument.starts_with("--");
        let Some(options) = argument.strip_prefix(['-', '+']) else {
            return has_script.then_some(argument);
        };
        has_script |= !is_long && options.contains('c');
        let has_value = if is_long {
            ["-rcfile", "-init-file"].contains(&options)
        } else {
            // The name of an option, as in `-o pipefail`.
            options.ends_with(['o', 'O'])
        };
        if has_value {
            arguments.next();
        }
    }
}
