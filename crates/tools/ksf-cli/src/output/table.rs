//! Rows in columns, each column as wide as its widest cell.

/// The side of a column on which its cells begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// The rows as lines that begin with `indent` spaces. Two spaces stand between columns, none at the end of a line; a
/// column without a word takes no place.
pub(crate) fn table<const N: usize>(indent: usize, columns: [Align; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let shown = (0..N).filter(|column| widths[*column] > 0);
        let cells: Vec<String> = shown
            .map(|column| match (columns[column], widths[column]) {
                (Align::Left, width) => format!("{:<width$}", row[column]),
                (Align::Right, width) => format!("{:>width$}", row[column]),
            })
            .collect();
        format!("{:indent$}{}", "", cells.join("  ")).trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["a", "1", "", "x"], ["bbb", "22", "", ""]].map(|row| row.map(str::to_owned));
        let text = table(2, [Align::Left, Align::Right, Align::Right, Align::Left], &rows);
        assert_eq!(text, "  a     1  x\n  bbb  22\n");
        assert_eq!(table::<1>(0, [Align::Left], &[]), "");
    }
}
