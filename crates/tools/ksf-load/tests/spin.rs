//! `--spin`: threads poll before they sleep, but not on a CPU that the server may need, and they say what it brought.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};

use crate::common::*;
use ksf_load::ClientSpin;
use ksf_load::report::document::SpinReport;

/// A server whose connections are served on one CPU.
fn server_on(cpu: usize, serve: impl Fn(TcpStream) -> std::io::Result<()> + Send + Clone + 'static) -> SocketAddr {
    tcp_server(move |stream| {
        pin(cpu);
        serve(stream)
    })
}

fn work(mut stream: TcpStream) -> std::io::Result<()> {
    while let Some(request) = read_work(&mut stream)? {
        stream.write_all(&work_reply(&request))?;
    }
    Ok(())
}

fn web(mut stream: TcpStream) -> std::io::Result<()> {
    while read_head(&mut stream)?.is_some() {
        stream.write_all(&ok_with("x"))?;
    }
    Ok(())
}

/// What the blocking loop, the event loop and connections that come and go brought, on `cpu` against servers on another.
fn spins(cpu: usize, server: usize, spin: &str) -> [SpinReport; 3] {
    let options = format!("-c 200 --cpu {cpu} --spin {spin}");
    let echo = run_pinned_echotest(&format!("{} -i 1 --nice 0 {options}", server_on(server, stream::echo)));
    echo.assert_clean(200);
    let work = run_pinned_worktest(&format!("{} -n 2 {options}", server_on(server, work)));
    work.assert_clean(200);
    let http = run_http(&format!("http://{} -n 2 -r 0 {options}", server_on(server, web)));
    http.assert_clean(200);
    let [echo, work, http] = [&echo.report().runs[0].spin, &work.report().run.spin, &http.run().spin];
    [echo, work, http].map(|spin| spin.clone().expect("it was asked for"))
}

#[test]
fn the_servers_cpu_is_not_polled_on() {
    let cpu = cpus()[0];
    for spin in spins(cpu, cpu, "1s") {
        assert!(spin.waits > 0, "{spin:?}");
        assert_eq!((spin.caught, spin.missed, spin.spent_s), (0, 0, 0.0));
    }
}

#[test]
fn a_cpu_of_its_own_is_polled_on() {
    let Some([client, server]) = two_cpus_or_skip() else { return };
    for spin in spins(client, server, "1s") {
        assert!(spin.caught > 0 && spin.caught <= spin.waits, "{spin:?}");
        assert!(spin.spent_s > 0.0, "{spin:?}");
    }
}

#[test]
fn what_was_asked_for_is_said() {
    let server = good_rpc_server();
    let off = run_rpctest(&format!("{server} -c 50"));
    let (config, run) = (&off.report().config, &off.report().runs[0]);
    assert_eq!((config.pace.spin, &run.spin), (ClientSpin::Off, &None));
    assert!(!off.stdout.contains("Spun%"), "{}", off.stdout);
    let auto = run_rpctest(&format!("{server} -c 50 --spin auto"));
    assert_eq!(auto.report().config.pace.spin, ClientSpin::Auto);
    assert!(auto.stdout.lines().next().unwrap().ends_with(" Spun%"), "{}", auto.stdout);
    let fixed = run_worktest(&format!("{} -c 50 --spin 20", tcp_server(work)));
    assert_eq!(fixed.report().config.pace.spin.to_string(), "20us");
    assert!(fixed.stdout.lines().last().unwrap().starts_with("spin   "), "{}", fixed.stdout);
    let web = run_http(&format!("http://{} -c 50 -r 0 -n 2 --spin 20us", tcp_server(web)));
    assert!(web.stdout.contains("\nspin         20us: "), "{}", web.stdout);
}

/// Over a Unix-domain socket it cannot be told whose CPU it is.
#[test]
fn where_the_servers_cpu_is_unknown_nothing_is_polled() {
    let folder = Folder::new();
    let path = folder.path("echo.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || stream::echo(listener.accept()?.0));
    let ran = run_echotest(&format!("unix:{} -c 100 --spin 1s", path.display()));
    ran.assert_clean(100);
    let spin = ran.report().runs[0].spin.clone().unwrap();
    assert_eq!((spin.caught, spin.missed), (0, 0));
}
