//! Two hosts on the loopback.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc;
use std::time::Instant;

use agent::client::{ClientError, output};

use super::super::link::Transport;
use super::*;

const LIMIT: Duration = Duration::from_secs(20);

/// Alpha with cell 0 and beta with cell 1. Dropping it removes their keys.
struct Two {
    alpha: Hosts,
    beta: Hosts,
    keys: tempfile::TempDir,
}

fn two() -> Two {
    let keys = tempfile::tempdir().unwrap();
    urpc::tls::make(keys.path(), ["alpha", "beta", "gone", "etcd"]).unwrap();
    let free = |ip: &str| -> SocketAddr {
        let listener = TcpListener::bind((ip, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        // The port of cell 1 is the next: beta's own.
        SocketAddr::new(address.ip(), address.port() - 1)
    };
    let host = |name: &str, ip: &str, cell| HostPlan {
        shared_memory: None,
        remote_paths: Vec::new(),
        name: name.to_owned(),
        address: free(ip),
        cells: vec![cell],
    };
    let hosts = vec![host("alpha", "127.0.0.1", 0), host("beta", "127.0.0.2", 1)];
    let site = |here: &str| {
        Hosts::open(Site {
            here: here.to_owned(),
            hosts: hosts.clone(),
            etcd: Vec::new(),
            runs_etcd: false,
            keys: keys.path().to_owned(),
            silence_ms: 20_000,
            spans: Default::default(),
            on_lost: config::cluster::OnLost::Keep,
            file: None,
        })
        .unwrap()
    };
    Two {
        alpha: site("alpha"),
        beta: site("beta"),
        keys,
    }
}

fn id(number: u16) -> CellId {
    CellId { number, life: 1 }
}

/// Accepts connections of beta; its links go to the receiver.
fn serve(beta: &Hosts) -> mpsc::Receiver<Link> {
    let listener = beta.listen(1).unwrap();
    let (send, receive) = mpsc::channel();
    let beta = beta.clone();
    std::thread::spawn(move || {
        let calling = Arc::new(CallTable::new(id(1)));
        beta.take(&listener, &calling, move |link| _ = send.send(link));
    });
    receive
}

#[test]
fn cells_of_two_hosts_are_linked_and_no_host_can_be_a_cell_of_another_host() {
    let Two {
        alpha,
        beta,
        keys: _keys,
    } = two();
    let links = serve(&beta);
    let calling = CallTable::new(id(0));
    let near = alpha.call(id(0), 1, &calling).unwrap().expect("no call back");
    let far = links.recv_timeout(LIMIT).unwrap();
    assert_eq!((near.peer, far.peer), (id(1), id(0)));
    // Alpha's key proves neither that it is cell 1, nor a cell that does not exist.
    for wrong in [1, 7] {
        assert!(alpha.call(id(wrong), 1, &CallTable::new(id(wrong))).is_err());
    }
    assert!(links.try_recv().is_err());
    let error = beta.call(id(1), 0, &CallTable::new(id(1))).unwrap_err();
    assert!(error.to_string().starts_with("host alpha: "), "{error}");
}

/// Two hosts that see the same file link through it, until one of them has a fact by which the stream is
/// faster.
#[test]
fn one_asserted_fact_makes_a_link_use_the_stream_in_place_of_shared_memory() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let stream_is_faster = "cell(0, \"alpha\")\ncell(1, \"beta\")\n\
        host_latency_ns(\"alpha\", \"beta\", \"tls\", 100)\n\
        host_latency_ns(\"alpha\", \"beta\", \"shared\", ";
    let known = |shared_ns: &str| {
        let facts = knowledge::fact::parse(&format!("{stream_is_faster}{shared_ns})")).unwrap();
        Arc::new(knowledge::RouteCosts::of(&facts.into_iter().collect()))
    };
    for (alpha_ns, beta_ns, way) in [
        (None, None, Transport::Shared),
        (Some("100"), None, Transport::Shared),
        (Some("101"), None, Transport::Stream),
        (None, Some("101"), Transport::Stream),
    ] {
        let mut two = two();
        for (hosts, ns) in [(&mut two.alpha, alpha_ns), (&mut two.beta, beta_ns)] {
            hosts.memory = Some(SharedMemory::of(file.path(), vec![[0, 1]]).unwrap());
            if let Some(ns) = ns {
                hosts.set_route_costs(known(ns));
            }
        }
        let links = serve(&two.beta);
        let near = two.alpha.call(id(0), 1, &CallTable::new(id(0))).unwrap();
        let far = links.recv_timeout(LIMIT).unwrap();
        let ways = [near.expect("no call back").transport, far.transport];
        assert_eq!(ways, [way; 2], "{alpha_ns:?} {beta_ns:?}");
    }
}

#[test]
fn only_this_program_is_run_for_other_hosts() {
    let Two {
        alpha,
        beta,
        keys: _keys,
    } = two();
    let _links = serve(&beta);
    let request = |program: &str| ExecRequest {
        argv: vec![program.to_owned(), "--list".to_owned()],
        env: Vec::new(),
        cwd: Some("/no such directory".to_owned()),
        tty: None,
    };
    let refused = output(alpha.command(1).unwrap(), &request("sh"), &[]);
    assert!(
        matches!(&refused, Err(ClientError::Refused(why)) if why == "only mirrorball is run for other hosts"),
        "{refused:?}"
    );
    // This program is the test, which lists itself.
    let (status, text, _) = output(alpha.command(1).unwrap(), &request(PROGRAM), &[]).unwrap();
    assert_eq!(status.code(), 0);
    assert!(String::from_utf8_lossy(&text).contains("only_this_program_is_run"));
}

/// `alpha` with the keys of another name, which the same authority has signed.
fn with_keys_of(name: &str, alpha: &Hosts, keys: &Path) -> Hosts {
    Hosts {
        identity: Identity::load(keys, name).unwrap(),
        ..alpha.clone()
    }
}

#[test]
fn keys_of_a_host_that_is_not_in_the_clusters_file_run_no_commands() {
    let Two { alpha, beta, keys } = two();
    let links = serve(&beta);
    let request = ExecRequest {
        argv: vec![PROGRAM.to_owned(), "--list".to_owned()],
        env: Vec::new(),
        cwd: None,
        tty: None,
    };
    for name in ["gone", "etcd"] {
        let stranger = with_keys_of(name, &alpha, keys.path());
        // With TLS 1.3 a caller's handshake ends before the other side has looked at its certificate.
        let answer = stranger.command(1).map(|stream| output(stream, &request, &[]));
        assert!(!matches!(answer, Ok(Ok(_))), "{name}: {answer:?}");
        assert!(stranger.call(id(0), 1, &CallTable::new(id(0))).is_err());
    }
    assert!(links.try_recv().is_err());
    let (status, _, _) = output(alpha.command(1).unwrap(), &request, &[]).unwrap();
    assert_eq!(status.code(), 0);
}

#[test]
fn a_removed_hosts_link_ends_within_a_second_and_no_other_is_made() {
    let Two { alpha, beta, keys } = two();
    let links = serve(&beta);
    let near = alpha.call(id(0), 1, &CallTable::new(id(0))).unwrap();
    let far = links.recv_timeout(LIMIT).unwrap();
    let _near = near.expect("no call back");
    urpc::tls::revoke(keys.path(), "alpha").unwrap();
    let since = Instant::now();
    far.receiving.run(|message, _| panic!("{message:?}"));
    assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
    assert!(alpha.call(id(0), 1, &CallTable::new(id(0))).is_err());
    assert!(links.try_recv().is_err());
}

#[test]
fn silent_connections_keep_no_host_from_its_links() {
    let Two {
        alpha,
        beta,
        keys: _keys,
    } = two();
    let links = serve(&beta);
    let address = beta.site().host_of(1).unwrap().address_of(1);
    let silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
    let since = Instant::now();
    alpha
        .call(id(0), 1, &CallTable::new(id(0)))
        .unwrap()
        .expect("no call back");
    assert!(
        since.elapsed() < HANDSHAKE_LIMIT,
        "only when the others were closed"
    );
    links.recv_timeout(LIMIT).unwrap();
    drop(silent);
}

#[test]
fn host_that_proves_itself_and_then_sends_nothing_is_closed_at_the_deadline() {
    let Two {
        alpha,
        beta,
        keys: _keys,
    } = two();
    let _links = serve(&beta);
    let address = beta.site().host_of(1).unwrap().address_of(1);
    let mut stream = alpha.connect(address, "beta").unwrap();
    let since = Instant::now();
    let mut sent = 0;
    // The first message's length, and then a byte at a time: no read takes longer than its own timeout.
    let _ = io::Write::write_all(&mut stream, &1000_u32.to_le_bytes());
    while since.elapsed() < LIMIT && io::Write::write_all(&mut stream, &[0]).is_ok() {
        std::thread::sleep(Duration::from_millis(50));
        sent += 1;
    }
    assert!(since.elapsed() < LIMIT / 2, "after {sent} bytes");
}

#[test]
fn a_warning_comes_in_the_last_month_of_a_key() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let now = SystemTime::now();
    assert_eq!(warning("alpha", now + WARN_BEFORE + DAY), None);
    let text = warning("alpha", now + 3 * DAY + DAY / 2).unwrap();
    assert!(
        text.starts_with("the key of alpha ends in 3 days; help: "),
        "{text}"
    );
}

#[test]
fn host_that_has_left_is_served_no_longer_and_one_that_has_joined_is() {
    let Two {
        alpha,
        beta,
        keys: _keys,
    } = two();
    let _links = serve(&beta);
    let both = beta.site();
    let mut alone = (*both).clone();
    alone.hosts.retain(|host| host.name == "beta");
    let ask = || {
        let said = alpha.command(1).map_err(ClientError::from);
        let request = ExecRequest {
            argv: vec!["other".to_owned()],
            env: Vec::new(),
            cwd: None,
            tty: None,
        };
        said.and_then(|stream| output(stream, &request, &[]))
            .unwrap_err()
            .to_string()
    };
    assert!(ask().contains("only mirrorball is run"), "{}", ask());
    beta.set_site(alone);
    assert!(!ask().contains("only mirrorball is run"), "{}", ask());
    beta.set_site((*both).clone());
    assert!(ask().contains("only mirrorball is run"), "{}", ask());
}
