//! Shares of procedures.

use super::call::Procedure;
use crate::files::{FileOperation, Shares};

/// The shares of SPECsfs2008's NFSv3 load, of a hundred (SPECsfs2008 User's Guide, table of operations).
const SFS2008: &str = "lookup=24,read=18,write=10,getattr=26,readlink=1,readdir=1,create=1,remove=1,fsstat=1,setattr=4,readdirplus=2,\
                       access=11";

/// Calls of procedures in shares, as `getattr=64,lookup=12`, or `sfs2008`.
pub type Mix = Shares<Procedure>;

impl FileOperation for Procedure {
    const ALL: &'static [Self] = &Procedure::ALL;
    const NOUN: &'static str = "procedure";
    const PUBLISHED: Option<(&'static str, &'static str)> = Some(("sfs2008", SFS2008));

    fn name(self) -> &'static str {
        Procedure::name(self)
    }

    fn number(self) -> u8 {
        self as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::protocol::Mix as _;
    use crate::files::shares::Draws;

    #[test]
    fn shares_are_read_and_drawn() {
        let mix: Mix = "getattr=3,read=1".parse().unwrap();
        assert_eq!(mix.in_words(), "getattr=3,read=1");
        assert!(mix.has(Procedure::Read) && !mix.has(Procedure::Null));
        let mut draws = Draws::new(&mix, 7, 0);
        let reads = (0..40_000).filter(|_| draws.draw() == Procedure::Read).count();
        assert!((9_500..10_500).contains(&reads), "{reads}");
        assert_eq!("null".parse::<Mix>().unwrap().in_words(), "null=1");
    }

    #[test]
    fn the_published_mix_has_a_hundred_parts() {
        let mix: Mix = "sfs2008".parse().unwrap();
        let shares = mix.in_words();
        let shares = shares.split(',').map(|part| part.split_once('=').unwrap().1.parse::<u32>().unwrap());
        assert_eq!(shares.sum::<u32>(), 100);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("", "\"\" is no procedure"),
            ("getattr=1,stat=2", "\"stat\" is no procedure"),
            ("getattr=0", "a share is a number"),
            ("getattr=x", "a share is a number"),
            ("getattr=1,getattr=2", "two shares"),
        ] {
            let error = text.parse::<Mix>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
