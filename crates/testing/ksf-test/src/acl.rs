//! POSIX ACLs (acl(5)) as the kernel keeps them in extended attributes.

/// Name of the attribute with the ACL of an object.
pub const ACCESS_ACL: &str = "system.posix_acl_access";
/// Name of the attribute with the ACL of new objects in a directory.
pub const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The users of an entry (linux/posix_acl.h).
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the kernel has these names")]
pub enum For {
    Owner,
    User(u32),
    OwnGroup,
    Group(u32),
    Mask,
    Others,
}

/// The value of the attribute. Permissions are those of a digit of a mode.
pub fn acl(entries: &[(For, u16)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (users, permissions) in entries {
        let (tag, id) = match users {
            For::Owner => (0x01_u16, u32::MAX),
            For::User(id) => (0x02, *id),
            For::OwnGroup => (0x04, u32::MAX),
            For::Group(id) => (0x08, *id),
            For::Mask => (0x10, u32::MAX),
            For::Others => (0x20, u32::MAX),
        };
        bytes.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}
