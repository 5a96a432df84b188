//! User and system time of the server while it is loaded: of a process tree, or of a control group.
//!
//! A process tree is the process and all its descendants. Their own times come from their CPU clocks, precise to the
//! nanosecond and including threads that have ended; children that were waited for are in their parent's account, in
//! clock ticks (proc_pid_stat(5)). A process that leaves without being waited for (its parent ignores SIGCHLD, or has
//! gone) keeps what it had when it was last seen. A control group misses nothing.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use crate::drive::sys::process_cpu_ns;
use crate::error::LoadError;

/// CPU time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CpuTime {
    /// User and system.
    pub(crate) all_ns: u64,
    /// Of a process tree only to a clock tick.
    pub(crate) user_ns: u64,
    pub(crate) system_ns: u64,
}

impl CpuTime {
    fn add(&mut self, other: CpuTime) {
        self.all_ns += other.all_ns;
        self.user_ns += other.user_ns;
        self.system_ns += other.system_ns;
    }

    fn since(self, before: CpuTime) -> CpuTime {
        CpuTime {
            all_ns: self.all_ns.saturating_sub(before.all_ns),
            user_ns: self.user_ns.saturating_sub(before.user_ns),
            system_ns: self.system_ns.saturating_sub(before.system_ns),
        }
    }
}

/// What is watched while the load runs.
#[derive(Debug)]
pub(crate) struct Watch {
    trees: Vec<Tree>,
    cgroup: Option<PathBuf>,
    before: CpuTime,
}

/// What the server used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) time: CpuTime,
    /// Processes that were seen; 0 for a control group.
    pub(crate) processes: u64,
    /// Of the processes named by the user, those that had gone at the end.
    pub(crate) roots_gone: u64,
}

impl Watch {
    /// Begins to watch; `None` if there is nothing to watch.
    pub(crate) fn begin(pids: &[u32], cgroup: Option<&Path>) -> Result<Option<Watch>, LoadError> {
        if pids.is_empty() && cgroup.is_none() {
            return Ok(None);
        }
        let trees = pids.iter().map(|pid| Tree::of(*pid)).collect::<Result<_, _>>()?;
        let mut watch = Watch { trees, cgroup: cgroup.map(Path::to_path_buf), before: CpuTime::default() };
        watch.before = watch.now()?;
        Ok(Some(watch))
    }

    /// To be called now and then, so that processes that come and go are seen.
    pub(crate) fn look(&mut self) {
        self.trees.iter_mut().for_each(Tree::look);
    }

    /// What was used since the begin.
    pub(crate) fn end(mut self) -> Result<Used, LoadError> {
        self.look();
        Ok(Used {
            time: self.now()?.since(self.before),
            processes: self.trees.iter().map(|tree| tree.seen).sum(),
            roots_gone: self.trees.iter().filter(|tree| !tree.members.contains_key(&tree.root)).count() as u64,
        })
    }

    fn now(&self) -> Result<CpuTime, LoadError> {
        let mut sum = CpuTime::default();
        self.trees.iter().for_each(|tree| sum.add(tree.total()));
        if let Some(cgroup) = &self.cgroup {
            sum.add(cgroup_time(cgroup)?);
        }
        Ok(sum)
    }
}

/// One process as it was last seen.
#[derive(Debug, Clone, Copy)]
struct Member {
    parent: u32,
    /// Tells it from another with its number.
    start_ticks: u64,
    own: CpuTime,
    /// Of children that were waited for, and theirs.
    reaped: CpuTime,
}

#[derive(Debug)]
struct Tree {
    root: u32,
    members: BTreeMap<u32, Member>,
    /// What processes had that left without being waited for.
    lost: CpuTime,
    seen: u64,
}

impl Tree {
    fn of(root: u32) -> Result<Tree, LoadError> {
        let mut tree = Tree { root, members: BTreeMap::new(), lost: CpuTime::default(), seen: 0 };
        tree.look();
        match tree.members.contains_key(&root) {
            true => Ok(tree),
            false => Err(LoadError::Usage(format!("--server-pid {root}: there is no such process"))),
        }
    }

    fn total(&self) -> CpuTime {
        let mut sum = self.lost;
        for member in self.members.values() {
            sum.add(member.own);
            sum.add(member.reaped);
        }
        sum
    }

    fn look(&mut self) {
        let mut now = BTreeMap::new();
        // Members are looked at themselves: who lost its parent is a descendant still.
        let mut ahead: Vec<u32> = self.members.keys().copied().chain([self.root]).collect();
        let mut known = ahead.clone();
        while let Some(pid) = ahead.pop() {
            let Some(member) = Member::read(pid) else { continue };
            let same = self.members.get(&pid).is_none_or(|was| was.start_ticks == member.start_ticks);
            if !same {
                continue;
            }
            now.insert(pid, member);
            for child in children(pid) {
                if !known.contains(&child) {
                    known.push(child);
                    ahead.push(child);
                }
            }
        }
        self.seen += now.keys().filter(|pid| !self.members.contains_key(pid)).count() as u64;
        let was = std::mem::replace(&mut self.members, now);
        self.settle_gone(&was);
    }

    /// Those who have gone are in the account of their parent, if it has waited for them.
    fn settle_gone(&mut self, was: &BTreeMap<u32, Member>) {
        let mut gone_by_parent: BTreeMap<u32, CpuTime> = BTreeMap::new();
        for (_, member) in was.iter().filter(|(pid, _)| !self.members.contains_key(pid)) {
            let gone = gone_by_parent.entry(member.parent).or_default();
            gone.add(member.own);
            gone.add(member.reaped);
        }
        for (parent, gone) in gone_by_parent {
            let reaped = match (self.members.get(&parent), was.get(&parent)) {
                (Some(now), Some(was)) => now.reaped.since(was.reaped),
                _ => CpuTime::default(),
            };
            // Accounts are in ticks, so they can be short by one.
            let missing = gone.since(reaped);
            if missing.all_ns > 2 * tick_ns() {
                self.lost.add(missing);
            }
        }
    }
}

impl Member {
    fn read(pid: u32) -> Option<Member> {
        let mut member = Member::parse(&read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        if let Some(all_ns) = process_cpu_ns(pid) {
            member.own.all_ns = all_ns;
        }
        Some(member)
    }

    /// Reads a line of proc_pid_stat(5).
    fn parse(stat: &str) -> Option<Member> {
        // The name is in parentheses and may have any characters, also parentheses and blanks.
        let (_, behind_name) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = behind_name.split_whitespace().collect();
        // Field 3 of the manual is the first behind the name.
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let time = |user: usize, system: usize| -> Option<CpuTime> {
            let (user_ns, system_ns) = (number(user)? * tick_ns(), number(system)? * tick_ns());
            Some(CpuTime { all_ns: user_ns + system_ns, user_ns, system_ns })
        };
        Some(Member { parent: number(4)? as u32, start_ticks: number(22)?, own: time(14, 15)?, reaped: time(16, 17)? })
    }
}

fn tick_ns() -> u64 {
    1_000_000_000 / rustix::param::clock_ticks_per_second().max(1)
}

/// The children of all threads of a process. Where the kernel has no list of them (CONFIG_PROC_CHILDREN), all
/// processes are asked for their parent.
fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut children = Vec::new();
    for thread in threads.flatten() {
        match read_to_string(thread.path().join("children")) {
            Ok(list) => children.extend(list.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok())),
            Err(_) if Path::new("/proc/self/task").exists() && !Path::new("/proc/thread-self/children").exists() => {
                return children_by_parent(pid);
            }
            // The thread has ended.
            Err(_) => {}
        }
    }
    children
}

fn children_by_parent(parent: u32) -> Vec<u32> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let stat = read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        Member::parse(&stat).is_some_and(|member| member.parent == parent)
    })
    .collect()
}

/// Of version 2: cpu.stat. Of version 1, where cpuacct has its own hierarchy: cpuacct.usage and cpuacct.stat.
fn cgroup_time(path: &Path) -> Result<CpuTime, LoadError> {
    let wrong = |source| LoadError::System { what: format!("--server-cgroup {}", path.display()), source };
    let field = |text: &str, name: &str| -> u64 {
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(key, _)| *key == name).and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(0)
    };
    if let Ok(usage) = read_to_string(path.join("cpuacct.usage")) {
        let stat = read_to_string(path.join("cpuacct.stat")).map_err(wrong)?;
        return Ok(CpuTime {
            all_ns: usage.trim().parse().unwrap_or(0),
            user_ns: field(&stat, "user") * tick_ns(),
            system_ns: field(&stat, "system") * tick_ns(),
        });
    }
    let stat = read_to_string(path.join("cpu.stat")).map_err(wrong)?;
    if !stat.contains("usage_usec") {
        let reason = "cpu.stat has no usage_usec; name a directory of a control group (version 2, or cpuacct)";
        return Err(wrong(std::io::Error::new(std::io::ErrorKind::InvalidData, reason)));
    }
    Ok(CpuTime {
        all_ns: field(&stat, "usage_usec") * 1000,
        user_ns: field(&stat, "user_usec") * 1000,
        system_ns: field(&stat, "system_usec") * 1000,
    })
}

#[cfg(test)]
mod tests {
    use ksf_test::wait_until;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_line_of_stat_is_read_whatever_the_name() {
        let line = "42 (a) b (c) S 7 42 42 0 -1 4194304 100 0 0 0 12 34 5 6 20 0 1 0 9876 1000 10 18446744073709551615";
        let member = Member::parse(line).unwrap();
        assert_eq!((member.parent, member.start_ticks), (7, 9876));
        assert_eq!((member.own.user_ns, member.own.system_ns), (12 * tick_ns(), 34 * tick_ns()));
        assert_eq!(member.reaped.all_ns, 11 * tick_ns());
        assert!(Member::parse("42 (a").is_none());
    }

    /// A shell that does what it reads, and answers.
    fn shell() -> (std::process::Child, impl FnMut(&str)) {
        let mut child =
            Command::new("sh").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("there is a shell");
        let mut orders = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let order = move |text: &str| {
            writeln!(orders, "{text}; echo done").unwrap();
            answers.read_line(&mut String::new()).unwrap();
        };
        (child, order)
    }

    /// Computes in a shell for a while; some clock ticks on any machine.
    const COMPUTE: &str = "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done";

    #[test]
    fn the_own_time_of_a_tree_and_that_of_children_that_have_gone_are_counted() {
        let (mut child, mut order) = shell();
        let used = |watch: Watch| watch.end().unwrap();
        let begin = || Watch::begin(&[child.id()], None).unwrap().unwrap();

        let watch = begin();
        order(COMPUTE);
        let own = used(watch);
        assert!(own.time.all_ns > 0 && own.processes == 1, "{own:?}");

        // Children that come and go between two looks are in the account of their parent.
        let watch = begin();
        order(&format!("({COMPUTE}; true); ({COMPUTE}; true)"));
        let reaped = used(watch);
        assert!(reaped.time.all_ns > own.time.all_ns / 2, "{reaped:?} {own:?}");

        // A grandchild that lives is found, and still counted when its parent has gone.
        let mut watch = begin();
        order(&format!("sh -c '({COMPUTE}; exec sleep 1000) & wait' > /dev/null & true"));
        let mut grandchild = None;
        wait_until("the grandchild to sleep", || {
            watch.look();
            grandchild = watch.trees[0].members.keys().copied().find(|pid| is_sleep(*pid));
            grandchild.is_some()
        });
        let grandchild = grandchild.expect("waited for");
        watch.look();
        let before = watch.trees[0].total();
        order("kill -9 $!; wait");
        watch.look();
        assert!(watch.trees[0].members.contains_key(&grandchild), "an orphan stays a member");
        assert!(watch.trees[0].total().all_ns + 4 * tick_ns() >= before.all_ns);
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(grandchild as i32).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        // Nobody of the tree waits for it: what it had stays.
        wait_until("the grandchild to end", || Member::read(grandchild).is_none());
        watch.look();
        assert!(watch.trees[0].total().all_ns + 4 * tick_ns() >= before.all_ns, "{before:?}");

        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Watch::begin(&[child.id()], None).is_err(), "it has gone");
    }

    fn is_sleep(pid: u32) -> bool {
        read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sleep")
    }

    #[test]
    fn a_control_group_is_read_in_both_versions() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().to_owned();
        let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
        assert_eq!(cgroup_time(&dir).unwrap_err().exit_code(), 71);
        write("cpu.stat", "nr_periods 0\n");
        assert_eq!(cgroup_time(&dir).unwrap_err().exit_code(), 71);
        write("cpu.stat", "usage_usec 5\nuser_usec 3\nsystem_usec 2\nnr_periods 0\n");
        let watch = Watch::begin(&[], Some(&dir)).unwrap().unwrap();
        write("cpu.stat", "usage_usec 105\nuser_usec 63\nsystem_usec 42\n");
        let time = watch.end().unwrap().time;
        assert_eq!((time.all_ns, time.user_ns, time.system_ns), (100_000, 60_000, 40_000));
        write("cpuacct.usage", "1234\n");
        write("cpuacct.stat", "user 1\nsystem 2\n");
        let time = cgroup_time(&dir).unwrap();
        assert_eq!((time.all_ns, time.system_ns), (1234, 2 * tick_ns()));
    }
}
