//! Starts of VMs, within the rights of the caller.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use config::settings::{MemberPolicy, Usage};
use config::{ConfigError, HostFacts, VmSpec};
use locks::IgnorePoison;
use nix::unistd::geteuid;
use registry::lease::Lease;
use registry::monitor::{Batch, Event};
use registry::vms::{self, BOOT_LIMIT_S};

use super::{Context, Result, folder, records};
use crate::caller::{Caller, Peer};
use crate::problem::Problem;
use crate::request_body::body;
use crate::slots::run_in_slot;
use crate::trusted_path;
use crate::views::Vm;

/// Time limit until a VM's vCPUs run: its memory may have to be allocated first.
const START_LIMIT: Duration = Duration::from_secs(300);

/// Starts a VM. The body is a VM file's keys as JSON, with a name and with absolute paths. Answers when its
/// vCPUs run.
#[utoipa::path(post, path = "/v1/vms", request_body = VmSpec, responses(
    (status = 201, body = Vm, description = "It runs."),
    (status = 400, body = Problem, description = "The spec is wrong."),
    (status = 403, body = Problem, description = "A member of the group may not start it."),
    (status = 409, body = Problem, description = "A VM of that name runs."),
    (status = 422, body = Problem, description = "It can't start on this host.")))]
pub(super) async fn start_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Extension(peer): Extension<Peer>,
    request: Request<Body>,
) -> Result<Response> {
    let mut spec: VmSpec = body(request).await?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |_| {
        let policy = caller.policy(&context.rights)?;
        let own_starts = policy.map(|(uid, _)| context.starts_of(uid));
        let _starts = own_starts.as_ref().map(|lock| lock.lock().ignore_poison());
        let mut names = None;
        if let Some((uid, policy)) = policy {
            names = peer.name_rules(geteuid().as_raw(), policy)?;
            admit(&spec, uid, policy, names.is_some())?;
        }
        let facts = match names {
            None => HostFacts::of_this_host(),
            Some(_) => HostFacts::without_files(),
        };
        let name = check(&spec, &facts)?;
        spec.list_default_card();
        let batch = Batch {
            vms: vec![(name.clone(), spec)],
            source: None,
            share_between: context.share_between,
            member: policy.map(|(uid, _)| uid),
            names,
            boot_limit_s: BOOT_LIMIT_S,
        };
        let never_ran = || {
            Problem::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                format!(
                    "{name} ended before it ran, or did not run within {} s",
                    START_LIMIT.as_secs()
                ),
            )
        };
        let lease = Lease::by_program(&context.program, &batch).map_err(|error| match error.kind() {
            // The program ended before it had read the VM.
            ErrorKind::BrokenPipe => never_ran(),
            _ => Problem::internal(error),
        })?;
        lease.limit_wait(START_LIMIT).map_err(Problem::internal)?;
        for event in lease.events().map_err(Problem::internal)? {
            match event {
                Event::Running { .. } => {
                    lease.detach().map_err(Problem::internal)?;
                    let record = vms::read(&folder(&name)?).map_err(Problem::internal)?;
                    return Ok((StatusCode::CREATED, Json(Vm::from(&record))).into_response());
                }
                Event::Failed { why, .. } => {
                    let status = if folder(&name).is_ok() {
                        StatusCode::CONFLICT
                    } else {
                        StatusCode::UNPROCESSABLE_ENTITY
                    };
                    return Err(Problem::new(status, why));
                }
                Event::Started { .. }
                | Event::FullDisks { .. }
                | Event::Paused { .. }
                | Event::StartsAgain { .. }
                | Event::Ended { .. } => {}
            }
        }
        Err(never_ran())
    })
    .await
}

/// Checks that a member may start a VM of this spec beside the running VMs. Files that are opened by the
/// API's rights, not by the member's, must lie where no other user can exchange them.
fn admit(spec: &VmSpec, uid: u32, policy: &MemberPolicy, has_own_rights: bool) -> Result<()> {
    let refused = |why| Problem::new(StatusCode::FORBIDDEN, why);
    let running = records()?;
    let own = running.iter().filter(|record| record.member == Some(uid));
    let used = Usage::of(own.map(|record| &record.spec));
    policy
        .admit(spec, used)
        .map_err(|fault| refused(format!("{}; {}", fault.message, fault.help)))?;
    for path in paths(spec).filter(|_| !has_own_rights) {
        trusted_path::check(path, geteuid().as_raw()).map_err(|why| refused(why.to_string()))?;
    }
    Ok(())
}

/// Yields the files that a spec names.
fn paths(spec: &VmSpec) -> impl Iterator<Item = &PathBuf> {
    let kernel = spec
        .kernel
        .iter()
        .flat_map(|kernel| [&kernel.path, &kernel.initrd]);
    let disks = spec.disks.iter().map(|disk| &disk.path);
    let folders = spec.folders.iter().map(|folder| &folder.path);
    kernel.flatten().chain(disks).chain(folders)
}

/// Checks a spec before anything is started; returns the VM's name.
fn check(spec: &VmSpec, facts: &HostFacts) -> Result<String> {
    let name = spec.name.clone();
    let name = name.ok_or_else(|| Problem::bad_request("a VM needs a `name` here"))?;
    if spec.command.is_some() {
        return Err(Problem::bad_request(
            "`command` is for `mirrorball run`; leave it out",
        ));
    }
    if let Some(relative) = paths(spec).find(|path| !path.is_absolute()) {
        return Err(Problem::bad_request(format!(
            "{}: write an absolute path",
            relative.display()
        )));
    }
    config::check(spec)
        .map_err(|fault| Problem::bad_request(format!("{}; {}", fault.message, fault.help)))?;
    config::check_host(spec, None, facts).map_err(|error: ConfigError| {
        let help = error.help.as_deref().unwrap_or_default();
        Problem::bad_request(format!("{error}; {help}"))
    })?;
    Ok(name)
}
