use std::time::Instant;

use shard_api::relation::Counter;

use super::*;

fn ended(script: &str, limit: Duration) -> Result<(Vec<u8>, Vec<u8>), AskError> {
    let (near, far) = UnixStream::pair().unwrap();
    let script = script.to_owned();
    std::thread::spawn(move || {
        agent::server::serve_programs(far, |request| {
            request.argv = ["sh", "-c", &script].map(str::to_owned).into();
            Ok::<_, io::Error>(())
        })
    });
    let command = ExecRequest {
        argv: vec![PROGRAM.to_owned()],
        env: Vec::new(),
        cwd: None,
        tty: None,
    };
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(output_within(near, command, b"in".to_vec(), limit)));
    told.recv_timeout(Duration::from_secs(20)).expect("an answer")
}

/// A part whose monitor's end of the connection is returned.
fn part() -> (RemotePart, UnixStream) {
    part_of(OF_HOME.versions)
}

fn part_of(versions: Versions) -> (RemotePart, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    let endpoint = Endpoint {
        host: "beta".to_owned(),
        cell: 1,
        address: "127.0.0.1:1".parse().unwrap(),
        token: Token::new().unwrap(),
    };
    let processor = HostProcessor {
        leaves: Vec::new(),
        counter: Counter {
            khz: 2_000_000,
            digits: None,
        },
        relies_on_counter: true,
    };
    let silence = Duration::from_secs(20);
    let part = RemotePart::over(endpoint, (processor, versions), near, silence).unwrap();
    (part, far)
}

#[test]
fn part_of_the_release_before_is_sent_no_order_or_request_that_it_does_not_know() {
    let (part, far) = part_of(Versions::FIRST);
    let stop = Order::StopVcpu { vcpu: 1, for_ms: 5 };
    for refused in [
        part.order(&stop).unwrap_err(),
        part.vcpus().unwrap_err(),
        part.pin(1, &[2]).unwrap_err(),
        part.limit(PartLimits::default()).unwrap_err(),
    ] {
        let refused = refused.to_string();
        assert!(
            refused.starts_with("host beta had the release before"),
            "{refused}"
        );
    }
    part.order(&Order::Pause).unwrap();
    let told: ToPart = receive(&mut BufReader::new(far)).unwrap();
    assert!(matches!(told, ToPart::Order(Order::Pause)), "{told:?}");
}

#[test]
fn request_about_the_other_host_gets_its_answer_and_a_refusal_names_the_host() {
    let (part, far) = part();
    let answers = [
        HostAnswer::Done,
        HostAnswer::Refused {
            why: "it has no CPU 2\u{1b}".to_owned(),
        },
        HostAnswer::Done,
    ];
    let answering = std::thread::spawn(move || {
        let to_home = Mutex::new(far.try_clone().unwrap());
        let mut far = BufReader::new(far);
        let mut requests = Vec::new();
        for answer in answers {
            let ToPart::OfHost { number, request } = receive(&mut far).unwrap() else {
                panic!("a request about the host");
            };
            requests.push(request);
            let answered = serde_json::to_vec(&FromPart::OfHost { number, answer }).unwrap();
            write_to(&to_home, &answered).unwrap();
        }
        requests
    });
    part.pin(1, &[2]).unwrap();
    let refused = part.pin(1, &[2]).unwrap_err().to_string();
    assert_eq!(refused, "cell 1 on host beta: it has no CPU 2 ");
    assert!(part.vcpus().is_err(), "an answer to another request");
    let pin = HostRequest::Pin {
        vcpu: 1,
        cpus: vec![2],
    };
    assert_eq!(answering.join().unwrap(), [pin.clone(), pin, HostRequest::Vcpus]);
}

#[test]
fn answers_of_another_host_have_the_numbers_of_the_orders_that_are_awaited() {
    let (part, _far) = part();
    let pause = part.order(&Order::Pause).unwrap();
    part.order(&Order::Step { offset: 1 }).unwrap();
    let resume = part.order(&Order::Resume).unwrap();
    assert!(resume > pause && pause > OrderId::default());
    let answered = |to, answer| Some(Report::Answer { to, answer });
    let stop = part.order(&Order::StopVcpu { vcpu: 1, for_ms: 5 }).unwrap();
    let go_on = part.order(&Order::ContinueVcpu { vcpu: 1 }).unwrap();
    assert!(go_on > stop && stop > resume);
    assert_eq!(part.answered(Answer::Done), answered(pause, Answer::Done));
    // The release before passes a refusal on as any report, with a number of its own.
    let refused = Answer::Refused {
        why: "the order is for the VM's home".to_owned(),
    };
    let to = OrderId {
        incarnation: 7,
        request: 7,
    };
    let report = Report::Answer { to, answer: refused };
    assert!(matches!(part.numbered(report.clone()), Report::Answer { to, .. } if to == resume));
    assert_eq!(part.answered(Answer::Done), answered(stop, Answer::Done));
    assert_eq!(part.answered(Answer::Done), answered(go_on, Answer::Done));
    assert_eq!(part.answered(Answer::Done), None, "all are answered");
    assert_eq!(part.numbered(report.clone()), report);
}

#[test]
fn answer_of_a_command_is_received() {
    let (output, said) = ended("cat; echo out >&2", Duration::from_secs(20)).unwrap();
    assert_eq!((&output[..], &said[..]), (&b"in"[..], &b"out\n"[..]));
}

#[test]
fn command_that_does_not_answer_fails_at_the_limit() {
    let since = Instant::now();
    let why = ended("sleep 60", Duration::from_secs(1)).unwrap_err().to_string();
    assert!(why.starts_with("it has not answered for 1 s"), "{why}");
    assert!(since.elapsed() >= Duration::from_secs(1));
}
